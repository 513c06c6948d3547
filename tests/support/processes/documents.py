"""The pages of the documentation, their fenced blocks and their links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        ROOT / "swift/MLXInferClient/README.md",
        *ROOT.glob("examples/swift/*/README.md"),
        *ROOT.glob("kernels_*/**/README.md"),
    ]
)
_FENCE = re.compile(r"(?P<run><!-- run -->\n)?^```(?P<kind>[^\n`]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!\\)!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    page: Path
    kind: str
    text: str
    line: int
    runs: bool
    """True if the page marks the snippet as one that runs as it is."""

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    """All fenced blocks of a page that begin at the margin."""
    text = page.read_text(encoding="utf-8")
    for found in _FENCE.finditer(text):
        yield Block(page, found["kind"].strip(), found["text"], text[: found.start("text")].count("\n") + 1, found["run"] is not None)


def commands(page: Path, program: str) -> Iterator[tuple[str, str]]:
    """Place and text of the lines that call a program, without their prompt and their comment, and of calls in the text."""
    for call in re.findall(rf"(?<!`)`({program} [^`\n]+)`(?!`)", _FENCE.sub("", page.read_text(encoding="utf-8"))):
        yield str(page.relative_to(ROOT)), call
    for block in blocks(page):
        if block.kind not in ("", "sh", "bash", "console"):
            continue
        for number, line in enumerate(block.text.replace("\\\n", " ").splitlines()):
            found = re.match(rf"(?:\$ |.*\| )?((?:[A-Z_]+=\S+ )*{program} .*)", line)
            if found:
                yield f"{block.name} +{number}", re.sub(r"\s{2,}#.*| #\s.*", "", found[1])


def links(page: Path) -> Iterator[str]:
    """Yield a page's links, except to the web."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    for link in _LINK.findall(text):
        if "://" not in link and not link.startswith("mailto:"):
            yield link


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page: texts that may follow # in a link."""
    headings = _HEADING.findall(_FENCE.sub("", page.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
