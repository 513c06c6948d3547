"""Markdown on the page: supported syntax, plain text, and the time for hostile text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from support.http.chromium import Chat, chromium
from support.http.live_server import LiveServer

pytestmark = pytest.mark.long

SHOW = """async (sources) => {
  const { MarkdownView } = await import("/page/markdown.js");
  return sources.map((source) => {
    const node = document.createElement("div");
    new MarkdownView(node).show(source);
    return node.innerHTML;
  });
}"""
STREAM = """async (source) => {
  const { MarkdownView } = await import("/page/markdown.js");
  const node = document.createElement("div");
  const view = new MarkdownView(node);
  for (let i = 1; i <= source.length; i += 1) view.show(source.slice(0, i));
  return node.innerHTML;
}"""
TOKENS = """async ([source, sizes]) => {
  const { MarkdownView } = await import("/page/markdown.js");
  const { Tokens } = await import("/page/tokens.js");
  const tokens = new Tokens();
  let at = 0;
  for (const size of sizes) {
    const text = source.slice(at, at + size);
    tokens.add(text, [{ token: text, logprob: -0.5, top_logprobs: [] }]);
    at += size;
  }
  const node = document.createElement("div");
  new MarkdownView(node).show(source, tokens);
  return [...node.querySelectorAll("[data-t]")].map((span) => [Number(span.dataset.t), span.textContent]);
}"""
TIME = """async (sources) => {
  const { MarkdownView } = await import("/page/markdown.js");
  return sources.map((source) => {
    const began = performance.now();
    new MarkdownView(document.createElement("div")).show(source);
    return performance.now() - began;
  });
}"""
M, P = '<span class="math" dir="ltr">', '<p class="math" dir="ltr">'
A = 'target="_blank" rel="noopener noreferrer"'
CASES = {
    "one\ntwo\n\nthree": "<p>one\ntwo</p><p>three</p>",
    "one  \ntwo\\\nthree": "<p>one  <br>two<br>three</p>",
    "# A\n### B ###\n#no": "<h2>A</h2><h4>B</h4><p>#no</p>",
    "*a* _b_ **c** __d__ ***e*** ~~f~~": (
        "<p><em>a</em> <em>b</em> <strong>c</strong> <strong>d</strong> <strong><em>e</em></strong> <del>f</del></p>"
    ),
    "**a *b* c** and *a **b** c*": "<p><strong>a <em>b</em> c</strong> and <em>a <strong>b</strong> c</em></p>",
    "snake_case_name 2 * 3 * 4 ** 5 a*": "<p>snake_case_name 2 * 3 * 4 ** 5 a*</p>",
    "`a*b*` ``c`d`` ` open": "<p><code>a*b*</code> <code>c`d</code> ` open</p>",
    "*a `*` b*": "<p><em>a <code>*</code> b</em></p>",
    r"\*a\* \` \q &lt;b&gt; &#64; &no;": r"<p>*a* ` \q &lt;b&gt; @ &amp;no;</p>",
    "> a\nb\n> > c": "<blockquote><p>a\nb</p><blockquote><p>c</p></blockquote></blockquote>",
    "---\n***": "<hr><hr>",
    "- a\n- b\n  more\n  - c\n    - d\n- e": "<ul><li>a</li><li>b\nmore<ul><li>c<ul><li>d</li></ul></li></ul></li><li>e</li></ul>",
    "3. a\n   - b\n4. c": '<ol start="3"><li>a<ul><li>b</li></ul></li><li>c</li></ol>',
    "- a\n\n- b": "<ul><li><p>a</p></li><li><p>b</p></li></ul>",
    "1. a\n\n   more\n2. b": "<ol><li><p>a</p><p>more</p></li><li>b</li></ol>",
    "* a\n- b": "<ul><li>a</li></ul><ul><li>b</li></ul>",
    "text\n- a": "<p>text</p><ul><li>a</li></ul>",
    "- [x] a\n- [ ] b": (
        '<ul><li class="task"><input type="checkbox" disabled="" checked="" aria-label="Task">a</li>'
        '<li class="task"><input type="checkbox" disabled="" aria-label="Task">b</li></ul>'
    ),
    '[a *b*](https://x.org/(y)?z=1 "t")': f'<p><a href="https://x.org/(y)?z=1" {A}>a <em>b</em></a></p>',
    "see https://x.org/a_b_c. Or <http://y.org>!": (
        f'<p>see <a href="https://x.org/a_b_c" {A}>https://x.org/a_b_c</a>. Or <a href="http://y.org" {A}>http://y.org</a>!</p>'
    ),
    "![alt](https://x.org/p.png)": f'<p><a href="https://x.org/p.png" {A}>alt</a></p>',
    "Setext\n======\nbelow": "<h2>Setext</h2><p>below</p>",
    "two\nlines\n---\n\nb\n\n---": "<h3>two\nlines</h3><p>b</p><hr>",
    # Formulas stay as they are.
    r"so \(a^2+b^2\) and \[ E = mc^2 \] here": rf"<p>so {M}\(a^2+b^2\)</span> and {M}\[ E = mc^2 \]</span> here</p>",
    r"\[ E = mc^2 \]": rf"{P}\[ E = mc^2 \]</p>",
    "text\n\\[\na_1 *b* _c_\n= b\n- c\n\\]\nmore": f"<p>text</p>{P}\\[\na_1 *b* _c_\n= b\n- c\n\\]</p><p>more</p>",
    "$$\n# x \\\\\n$$": f"{P}$$\n# x \\\\\n$$</p>",
    "\\begin{align}\n- a &= b \\\\\n\\end{align}": f"{P}\\begin{{align}}\n- a &amp;= b \\\\\n\\end{{align}}</p>",
    r"\int x\,dx \{1\} \; \: \!": r"<p>\int x\,dx \{1\} \; \: \!</p>",
    r"$a_1 * b_2 * c$ and **$x*y$**": f"<p>{M}$a_1 * b_2 * c$</span> and <strong>{M}$x*y$</span></strong></p>",
    "costs $5 and *$10*, $5-$10, \\$3": "<p>costs $5 and <em>$10</em>, $5-$10, $3</p>",
    r"\( open *a*": r"<p>\( open <em>a</em></p>",
    r"`\(a\)`": r"<p><code>\(a\)</code></p>",
    # Text that must not become active.
    "<img src=x onerror=alert(1)>\n\n<script>alert(1)</script>": (
        "<p>&lt;img src=x onerror=alert(1)&gt;</p><p>&lt;script&gt;alert(1)&lt;/script&gt;</p>"
    ),
    "[a](javascript:alert(1)) [b](data:text/html,x) [c](/v1/models) [d](JaVaScript:1)": (
        "<p>[a](javascript:alert(1)) [b](data:text/html,x) [c](/v1/models) [d](JaVaScript:1)</p>"
    ),
    '[a](https://x.org/"onclick="alert(1))': (f'<p><a href="https://x.org/&quot;onclick=&quot;alert(1)" {A}>a</a></p>'),
    "": "",
}
HOSTILE = [
    "*" * 20_000,
    "**a " * 10_000,
    "[" * 20_000,
    "`" * 20_000,
    "`a``" * 5_000,
    "> " * 10_000,
    "_a*" * 7_000,
    "- " * 10_000,
    "[a](" * 5_000,
    "![" * 10_000,
    "<http://" * 5_000,
    "|" * 10_000 + "\n" + "|-" * 10_000,
    "\\" * 20_000,
    "1. a\n" * 5_000,
    "a\n> " * 5_000,
    "~~a~ " * 5_000,
    "***a** " * 5_000,
    "&amp" * 5_000,
    "```\n" * 5_001,
    " " * 50_000 + "x",
    "\\(" * 10_000,
    "\\[\n" * 5_000,
    "$a " * 7_000,
    "$a" * 10_000,
    "*\\(" * 5_000 + "\\)",
    "\\begin{a}" * 3_000,
    "a\n--\n" * 5_000,
    "*a`" * 7_000,
]


@pytest.fixture(scope="module")
def page(live: LiveServer) -> Iterator[Any]:
    with chromium() as browser:
        chat = Chat(browser, f"{live.url}/")
        chat.page.route("**/vendor/*", lambda route: route.abort())  # code and formulas stay plain
        yield chat.page
        assert chat.errors == []


def test_what_it_understands(page: Any) -> None:
    found = dict(zip(CASES, page.evaluate(SHOW, list(CASES)), strict=True))
    assert {source: shown.replace(' dir="auto"', "") for source, shown in found.items()} == CASES


def test_blocks_are_laid_out_from_their_own_side(page: Any) -> None:
    hebrew = "\u05e9\u05dc\u05d5\u05dd"
    rtl, ltr, quoted, code, table = page.evaluate(
        SHOW, [f"- {hebrew}\n- b", f"a\n\n# {hebrew} b", f"> {hebrew}", f"```\n{hebrew}\n```", f"| {hebrew} | b |\n|---|---|\n| c | d |"]
    )
    assert rtl == f'<ul dir="rtl"><li>{hebrew}</li><li>b</li></ul>'
    assert ltr == f'<p dir="auto">a</p><h2 dir="auto">{hebrew} b</h2>'
    assert quoted == f'<blockquote dir="rtl"><p dir="auto">{hebrew}</p></blockquote>'
    assert code.startswith('<figure class="code" dir="ltr">')
    assert table.startswith('<div class="table" dir="rtl"')
    assert f'<th dir="auto">{hebrew}</th>' in table


def test_code_and_tables(page: Any) -> None:
    source = "```python title\n  a < b\n\n*c*\n```\nafter\n\n| a | b|c |\n|:-:|-|--:|\n| `x|y` | \\| |\n| 1 | 2 | 3 | 4 |\n\n~~~\nopen"
    (found,) = page.evaluate(SHOW, [source])
    bare = re.sub(r"<button.*?</button>", "", found).replace(' dir="auto"', "")
    assert '<figcaption><span>python</span></figcaption><pre tabindex="0"><code>  a &lt; b\n\n*c*</code></pre>' in bare
    assert "<p>after</p>" in bare
    assert '<tr><th class="center">a</th><th>b</th><th class="right">c</th></tr>' in bare
    assert '<tr><td class="center"><code>x|y</code></td><td>|</td><td class="right"></td></tr>' in bare
    assert '<tr><td class="center">1</td><td>2</td><td class="right">3</td></tr>' in bare
    assert bare.endswith('<span>text</span></figcaption><pre tabindex="0"><code>open</code></pre></figure>')


def test_growing_text_ends_as_the_whole_text(page: Any) -> None:
    source = "# A\n\ntext **b** `c`\n- one\n  - two\n\n- three\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```js\nlet x;\n```\n> q\n\nend"
    assert page.evaluate(STREAM, source) == page.evaluate(SHOW, [source])[0]


def test_every_shown_character_knows_its_token(page: Any) -> None:
    source = "# Ab\n\nc **de** `fg` [hi](https://x.org)\n- jk\n  > lm\n\n| n | o |\n|---|---|\n| pq | r |\n\n```\nst\nuv\n```\n&amp; \\*"
    sizes = [1] * len(source)
    marked = page.evaluate(TOKENS, [source, sizes])
    assert len(marked) > 25
    for token, text in marked:
        assert text == source[token]
    shown = "".join(text for _, text in marked)
    for word in ("Ab", "de", "fg", "hi", "jk", "lm", "pq", "st", "uv", "&", "*"):
        assert word in shown


def test_hostile_text_takes_no_longer(page: Any) -> None:
    page.evaluate(TIME, ["warm *up* `it`"] * 5)
    times = dict(zip((text[:12] for text in HOSTILE), page.evaluate(TIME, HOSTILE), strict=True))
    assert {text: ms for text, ms in times.items() if ms > 1500} == {}
