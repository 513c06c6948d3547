"""The Swift in the documentation is what `make test-swift` compiles: the package's tests, which run it, and the tutorials' files."""

from __future__ import annotations

import re

import pytest
from support.processes.documents import ROOT, Block, blocks

PACKAGE = ROOT / "swift/MLXInferClient"
CATALOGUE = PACKAGE / "Sources/MLXInferClient/MLXInferClient.docc"
COMPILED = [*PACKAGE.glob("Tests/MLXInferClientTests/Live/Snippet*.swift"), *CATALOGUE.glob("Resources/*.swift")]
PAGES = [ROOT / "docs/swift.md", PACKAGE / "README.md"]
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
    compiled, wanted = [line for file in COMPILED for line in _lines(file.read_text(encoding="utf-8"))], _lines(block.text)
    assert any(compiled[start : start + len(wanted)] == wanted for start in range(len(compiled))), block.text


def test_tutorials_show_every_file_of_code() -> None:
    shown = [
        name for page in CATALOGUE.glob("Tutorials/*.tutorial") for name in re.findall(r'file: "(.+?)"', page.read_text(encoding="utf-8"))
    ]
    assert sorted(shown) == sorted(file.name for file in CATALOGUE.glob("Resources/*.swift"))
    assert len(list(CATALOGUE.glob("Tutorials/*.tutorial"))) == 4
