"""The Swift in the documentation is what the package's tests compile, and run against a server: `make test-swift`."""

from __future__ import annotations

import pytest
from support.processes.documents import ROOT, Block, blocks

COMPILED = ROOT / "swift/MLXInferClient/Tests/MLXInferClientTests/Live/Snippets.swift"
PAGES = [ROOT / "docs/swift.md", ROOT / "swift/MLXInferClient/README.md"]
SNIPPETS = [block for page in PAGES for block in blocks(page) if block.kind == "swift"]
FRAME = ("import MLXInferClient", "let client = Client()")
"""Beginning of a standalone snippet; the tests have a client of their own."""


def _lines(text: str) -> list[str]:
    found = (line.partition("  //")[0].strip() for line in text.splitlines())
    return [line for line in found if line and line not in FRAME]


def test_there_are_snippets() -> None:
    assert len(SNIPPETS) > 6


@pytest.mark.parametrize("block", SNIPPETS, ids=lambda block: block.name)
def test_a_snippet_is_compiled(block: Block) -> None:
    compiled, wanted = _lines(COMPILED.read_text(encoding="utf-8")), _lines(block.text)
    assert any(compiled[start : start + len(wanted)] == wanted for start in range(len(compiled))), block.text
