"""All HTML that objects show themselves as is what every front end renders as it is: JupyterLab, VS Code's webviews, marimo, GitHub.

VS Code puts `text/html` into a webview of a workspace that is trusted; JupyterLab sanitizes what a notebook brought with it from
elsewhere. Neither takes anything from what has no scripts, handlers, links, forms, style sheets and pictures from somewhere else.
"""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.models.tiny_directory import tiny_directory

from mlxinfer import LLM, Completion, SamplingParams, TokenLogprob, ToolCall, Usage
from mlxinfer.convert.report import Quality
from mlxinfer.notebook import cache_errors, cache_map, compare, recorded, show
from mlxinfer.notebook.formats import conversion_html

ELEMENTS = {"div", "span", "b", "code", "table", "tr", "th", "td", "details", "summary"}
PROPERTIES = {
    *("background", "border-radius", "display", "flex", "flex-wrap", "font-size", "gap", "line-height", "max-width", "min-width"),
    *("opacity", "padding", "text-align", "vertical-align", "white-space"),
}
"""None of them sets the colour of text: it stays the front end's own, light or dark."""
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)> & \"'"


class Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.text, self.open = "", list[str]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        assert tag in ELEMENTS
        for name, value in attrs:
            assert name in ("style", "title"), (tag, name)
            if name == "style":
                found = dict(part.split(":", 1) for part in (value or "").split(";") if part)
                assert {key.strip() for key in found} <= PROPERTIES
                assert not re.search(r"url\(|expression|@|\\", value or "")
                assert "background" not in found or found["background"].startswith("rgba(")  # seen through, on light and on dark

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(html: str) -> str:
    """The text that is seen; fails for what a front end could leave out."""
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert not reader.open
    return reader.text


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory):
    with LLM(tiny_directory(tmp_path_factory.mktemp("models") / "tiny", eos=False)) as opened:
        yield opened


def test_answers() -> None:
    tokens = [TokenLogprob(1, HOSTILE, -1.0, ((2, HOSTILE, -1.5),))]
    answer = Completion(HOSTILE, [1], "stop", Usage(3, 1), tokens, reasoning=HOSTILE, tool_calls=[ToolCall("id", HOSTILE, '{"a": "<b>"}')])
    for value in (answer, [answer, answer], Completion(HOSTILE, [1], "stop", Usage(3, 1))):
        text = read(show(value).html)
        assert HOSTILE in text


def test_what_a_model_is_and_does(llm: LLM) -> None:
    with recorded(llm) as timeline:
        llm.generate("abc" * 30, SamplingParams(max_tokens=3))
    trace = llm.trace("abc" * 30, what="kv")
    inside = llm.trace("hello <b>")
    text = read(show(inside).html)
    assert text.startswith("hello <b>")
    assert "residual0 to 3" in text
    for shown in (inside.logit_lens(), llm.trace("abc", layers=1, what="residual")):
        assert read(show(shown).html)
        assert len(repr(shown)) < 100
    values = [llm, llm.stats(), timeline, cache_map(llm), cache_errors(trace), compare([llm, llm], HOSTILE, SamplingParams(max_tokens=2))]
    for value in values:
        assert read(show(value).html).strip()
        assert repr(value)


def test_a_conversion() -> None:
    tensor = SimpleNamespace(name=HOSTILE, shape=(2, 3), action="kept", stored="<q>", error=0.1)
    report = SimpleNamespace(
        nbytes=1, bits_per_weight=4.0, source_nbytes=2, actions={"kept": 1}, quality=Quality(0.1, 0.9, 64), tensors=[tensor]
    )
    assert HOSTILE in read(conversion_html(report))


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem[:2])
def test_what_notebooks_hold(path: Path) -> None:
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        for output in cell.get("outputs", ()):
            read("".join(output.get("data", {}).get("text/html", ())))
