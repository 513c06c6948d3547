"""The bar of complete answers."""

from __future__ import annotations

import asyncio
import io
import sys
from pathlib import Path

import pytest

from mlxinfer import LLM, AsyncLLM

MODEL = Path(__file__).parents[1] / "golden" / "arch" / "llama"
PROMPTS = [list(range(2, 12)), list(range(5, 9)), [7, 8, 9]]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def sync(progress: bool) -> list[str]:
    with LLM(MODEL, dtype="float32", max_context=64) as llm:
        return [answer.text for answer in llm.generate(PROMPTS, max_tokens=4, temperature=0, n=1, progress=progress)]


def in_a_loop(progress: bool) -> list[str]:
    async def run() -> list[str]:
        async with AsyncLLM(MODEL, dtype="float32", max_context=64) as llm:
            return [answer.text for answer in await llm.generate(PROMPTS, max_tokens=4, temperature=0, progress=progress)]

    return asyncio.run(run())


@pytest.mark.parametrize("door", [sync, in_a_loop])
def test_answers_are_counted_on_request(door, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm-256color")
    quiet = door(False)
    assert terminal.getvalue() == ""
    assert door(True) == quiet
    assert "3/3" in terminal.getvalue()
