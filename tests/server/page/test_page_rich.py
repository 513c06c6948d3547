"""Highlighted code and drawn formulas on the page, with the libraries that the server ships."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.http.chromium import Chat, chromium
from support.http.live_server import LiveServer

pytestmark = pytest.mark.long

SHOW = """async ([source, tokens]) => {
  const { MarkdownView } = await import("/page/markdown.js");
  const { Tokens } = await import("/page/tokens.js");
  await import("/page/vendor/highlight.js");
  await import("/page/vendor/temml.js");
  const holder = document.querySelector("#transcript");
  holder.replaceChildren(document.createElement("div"));
  holder.firstChild.className = "md";
  let known = null;
  if (tokens) {
    known = new Tokens();
    for (const letter of source) known.add(letter, [{ token: letter, logprob: -0.5, top_logprobs: [] }]);
  }
  const view = new MarkdownView(holder.firstChild);
  view.show(source, known);
  await new Promise((settle) => { setTimeout(settle, 0); });
  return holder.firstChild.innerHTML;
}"""
STREAM = """(source) => import("/page/markdown.js").then(({ MarkdownView }) => {
  const node = document.createElement("div");
  const view = new MarkdownView(node);
  for (let i = 1; i <= source.length; i += 1) view.show(source.slice(0, i));
  return node.innerHTML;
})"""
PARTS = "() => [...document.querySelectorAll('#transcript [class^=hl-]')].map((node) => [node.className, node.textContent])"
SHAPES = """() => [...document.querySelectorAll("#transcript .math")].map((node) =>
  [node.tagName, node.firstElementChild?.tagName ?? null, node.firstElementChild?.getAttribute("display") ?? null])"""


@pytest.fixture(scope="module")
def page(live: LiveServer) -> Iterator[Any]:
    with chromium() as browser:
        chat = Chat(browser, f"{live.url}/")
        yield chat.page
        assert chat.errors == []


def test_code_is_highlighted(page: Any) -> None:
    source = 'def f(x):\n    return f"{x} < 1"  # <b>bold</b>'
    page.evaluate(SHOW, [f"```py\n{source}\n```", False])
    parts = page.evaluate(PARTS)
    for part in (["hl-keyword", "def"], ["hl-title", "f"], ["hl-comment", "# <b>bold</b>"], ["hl-subst", "{x}"]):
        assert part in parts
    assert page.inner_text("#transcript code") == source
    colors = page.evaluate(
        "() => new Set([...document.querySelectorAll('#transcript [class^=hl-]')].map((node) => getComputedStyle(node).color)).size"
    )
    assert colors >= 3


@pytest.mark.parametrize(
    "name",
    [
        "bash",
        "sh",
        "c",
        "c++",
        "cpp",
        "c#",
        "css",
        "diff",
        "dockerfile",
        "go",
        "toml",
        "ini",
        "java",
        "js",
        "jsx",
        "json",
        "kotlin",
        "latex",
        "lua",
        "makefile",
        "md",
        "php",
        "python",
        "r",
        "rb",
        "rust",
        "shell",
        "console",
        "sql",
        "swift",
        "ts",
        "tsx",
        "html",
        "xml",
        "yaml",
        "yml",
    ],
)
def test_languages(page: Any, name: str) -> None:
    source = 'if x = "a" then 12 end\n<b class="c">x</b>\n# y: 3\n- z'
    page.evaluate(SHOW, [f"```{name}\n{source}\n```", False])
    assert page.evaluate(PARTS)
    assert page.evaluate("() => document.querySelector('#transcript code').textContent") == source


def test_other_languages_stay_plain(page: Any) -> None:
    for name in ("", "nolang", "__proto__", "constructor"):
        found = page.evaluate(SHOW, [f"```{name}\ndef f\n```", False])
        assert "<code>def f</code>" in found
    for hostile in ("def f\n" * 10_000, "1" * 600 + "\n", "def f\n" * 2_000 + "\n~~~"):  # long, one long line, long and growing
        assert "hl-" not in page.evaluate(SHOW, [f"```py\n{hostile}" + "```" * ("~" not in hostile), False])


def test_growing_code_and_formulas_end_as_the_whole(page: Any) -> None:
    source = "a \\(x^2\\) b\n\n```js\nlet x = 1;\n// `c`\n```\n\n$$\n\\frac{1}{2}\n$$\nend $y$."
    whole = page.evaluate(SHOW, [source, False])
    assert (whole.count("<math"), whole.count("hl-keyword")) == (3, 1)
    assert page.evaluate(STREAM, source) == whole


def test_tokens_of_highlighted_code(page: Any) -> None:
    source = "```py\ndef f\n```\n\n$x$"
    page.evaluate(SHOW, [source, True])
    marked = page.evaluate("() => [...document.querySelectorAll('#transcript [data-t]')].map((n) => [Number(n.dataset.t), n.textContent])")
    assert "".join(text for _, text in marked) == "def f$x$"
    assert all(source[token] == text for token, text in marked)
    assert ["hl-keyword", "def"] in page.evaluate(PARTS)
    assert page.evaluate(SHAPES) == [["SPAN", "SPAN", None]]  # the tokens are shown, not the formula


def test_formulas_are_drawn(page: Any) -> None:
    source = r"""so \(a^2\) and $x_1$, \[ E = mc^2 \].

$$
\frac{1}{2}
$$

\begin{align}
a &= b \\
c &= d
\end{align}

- \(\sum_{i=1}^n i\) costs $5 and $6"""
    page.evaluate(SHOW, [source, False])
    assert page.evaluate(SHAPES) == [
        ["SPAN", "math", None],
        ["SPAN", "math", None],
        ["SPAN", "math", "block"],
        ["P", "math", "block"],
        ["P", "math", "block"],
        ["SPAN", "math", None],
    ]
    assert page.inner_text("#transcript li").endswith("costs $5 and $6")
    assert page.locator("#transcript mfrac").bounding_box()["height"] > 20
    assert page.locator("#transcript mtr").count() == 2
    assert page.locator("link[href='page/vendor/temml.css']").count() == 1


@pytest.mark.parametrize(
    "source",
    [
        r"\(\frac{1\)",
        r"\(\unknowncommand\)",
        r"\(\href{javascript:alert(1)}{x}\)",
        r"\(\includegraphics{https://example.org/x.png}\)",
        r"\(\def\a{\a\a}\a\)",
        "\\(" + r"\sqrt" * 900 + "x\\)",
        "\\(" + "{" * 2000 + "x" + "}" * 2000 + "\\)",
        "\\(" + "x" * 6000 + "\\)",
    ],
    ids=lambda source: source[:14],
)
def test_what_cannot_be_drawn_stays_text(page: Any, source: str) -> None:
    page.evaluate(SHOW, [source, False])
    assert page.evaluate("() => document.querySelector('#transcript p').textContent") == source
    assert page.locator("#transcript math").count() == 0


def test_a_formula_cannot_cover_the_page(page: Any) -> None:
    page.evaluate(SHOW, [r"\(\rule{9999em}{9999em}\) \(\kern-9999pt x\) \(\textcolor{red}{x}\)", False])
    page.wait_for_selector("#transcript math >> nth=2", state="attached")
    for box in page.locator("#transcript math").evaluate_all("(all) => all.map((one) => one.getBoundingClientRect().height)"):
        assert box < 1000


def test_they_are_loaded_only_when_needed(page: Any) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.reload()
    page.wait_for_selector("#model option", state="attached")
    assert any(url.endswith("/page/rich.js") for url in asked)
    assert not [url for url in asked if "vendor" in url]
