"""Snippets that are marked with `<!-- run -->` run from top to bottom of their page, on SmolLM2."""

from __future__ import annotations

import ast
import asyncio
import inspect
from pathlib import Path

import pytest
from support.processes.documents import PAGES, ROOT, blocks

RUNNING = [page for page in PAGES if any(block.runs for block in blocks(page))]


@pytest.mark.model
@pytest.mark.long
@pytest.mark.parametrize("page", RUNNING, ids=lambda page: str(page.relative_to(ROOT)))
def test_snippets_run(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {"__name__": "__main__"}
    try:
        for block in blocks(page):
            if not block.runs:
                continue
            code = compile(block.text, block.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            if code.co_flags & inspect.CO_COROUTINE:
                asyncio.run(eval(code, names))
            else:
                exec(code, names)
    finally:
        for name in ("llm",):
            if hasattr(names.get(name), "close"):
                names[name].close()  # type: ignore[attr-defined]
    assert capsys.readouterr().out.strip()
