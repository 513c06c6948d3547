from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from mlxinfer.cli.repl.markdown import LONGEST_SPAN, MarkdownStream, Piece, pieces

BOLD, CODE, RESET = "\x1b[1m", "\x1b[36m", "\x1b[0m"


def rendered(text: str, width: int = 60, cut: int | None = None) -> str:
    stream = MarkdownStream(width)
    size = cut or len(text) or 1
    return "".join(stream.feed(text[i : i + size]) for i in range(0, len(text), size)) + stream.close()


def test_links_show_their_address() -> None:
    assert (
        plain('see [the *docs*](https://x.y/a_(b)) and ![a cat](cat.png "title").')
        == "see the docs (https://x.y/a_(b)) and a cat (cat.png).\n"
    )
    assert plain("[https://x.y](https://x.y) [1] [a] (b) x[i](j") == "https://x.y [1] [a] (b) x[i](j\n"
    stream = MarkdownStream(60)
    assert stream.feed("see [the ") == "see "
    assert stream.feed("docs](a) ").endswith("(a)\x1b[0m ")


def test_formulas_keep_their_backslashes() -> None:
    assert plain(r"\(a+b\) \[x_1 * y_1\] \_") == r"\(a+b\) \[x_1 * y_1\] _" + "\n"


def test_entities_are_text_unless_they_are_control_characters() -> None:
    assert plain("&lt;b&gt; &amp; &eacute; &#27;[31m &nosuch; a&b") == "<b> & é &#27;[31m &nosuch; a&b\n"


def test_task_lists_nested_quotes_and_underlined_headings() -> None:
    assert plain("- [ ] a\n- [x] b\n- [c] d\n") == "• ☐ a\n• ☑ b\n• [c] d\n"
    assert plain("> a\n> > b\n") == "▌ a\n▌ ▌ b\n"
    assert plain("Title\n=====\n") == "Title\n" + "═" * 40 + "\n"


def test_nothing_in_a_table_is_cut_off() -> None:
    text = "一二三四五六七八九十" * 3
    shown = plain(f"| a | b |\n|---|--:|\n| {text} | {'x' * 50} |\n| c<br>d | e \\| f |\n", 40)
    assert "".join(c for c in shown if c in "一二三四五六七八九十") == text
    assert shown.count("x") == 50
    assert "e | f" in shown
    assert "…" not in shown
    assert all(cell_len(line) <= 40 for line in shown.split("\n"))


def test_tables_without_a_head_and_with_rows_of_different_lengths() -> None:
    assert plain("| a | b |\n| c |\n").split() == ["a", "b", "c"]
    assert plain("|a|\n").split() == ["a"]
    assert plain("|\n|\n").strip() == ""


def test_without_colours_the_layout_stays() -> None:
    stream = MarkdownStream(60, colours=False)
    out = stream.feed("**b** `code`\n```python\nx = 1\n```\n| a |\n|---|\n| `c` |\n") + stream.close()
    assert BOLD in out
    assert "```" not in out
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]", out)


def test_what_is_too_long_for_a_word_comes_out() -> None:
    stream = MarkdownStream(60)
    assert stream.feed("x" * 1000)


def plain(text: str, width: int = 60) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", rendered(text, width))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a **b** c", [("a ", ()), ("b", ("bold",)), (" c", ())]),
        ("*a* _b_ ", [("a", ("italic",)), (" ", ()), ("b", ("italic",)), (" ", ())]),
        ("__c__ ~~d~~", [("c", ("bold",)), (" ", ()), ("d", ("strike",))]),
        ("***a***", [("a", ("bold", "italic"))]),
        ("**a `b` c**", [("a ", ("bold",)), ("b", ("bold", "code")), (" c", ("bold",))]),
        ("`a * b` `` c`d ``", [("a * b", ("code",)), (" ", ()), ("c`d", ("code",))]),
        ("snake_case_name 2*3*4 2 * 3 * 4", [("snake_case_name 2*3*4 2 * 3 * 4", ())]),
        ("*args and **kwargs", [("*args and **kwargs", ())]),
        (r"\*a\* \d", [(r"*a* \d", ())]),
        ("**bold*", [("**bold*", ())]),
    ],
)  # fmt: skip
def test_inline(text: str, expected: list[tuple[str, tuple[str, ...]]]) -> None:
    assert pieces(text, final=True) == ([Piece(part, frozenset(styles)) for part, styles in expected], "")


def test_open_emphasis_is_held_until_it_closes_or_grows_too_long() -> None:
    assert pieces("a **b c ", final=False) == ([Piece("a ", frozenset())], "**b c ")
    long = "**" + "x " * LONGEST_SPAN
    assert pieces(long, final=False) == ([Piece(long, frozenset())], "")


def test_words_come_out_as_soon_as_they_end() -> None:
    stream = MarkdownStream(60)
    assert stream.feed("Par") == ""
    assert stream.feed("is is ") == "Paris is "
    assert stream.feed("**the cap") == ""
    assert stream.feed("ital** ") == f"{BOLD}the{RESET}{BOLD} {RESET}{BOLD}capital{RESET} "
    assert stream.feed("of") + stream.close() == "of\n"


def test_long_lines_wrap_under_their_own_text() -> None:
    assert plain("- aaaaaaaa bbbbbbbb cccccccc", 20).split("\n") == ["• aaaaaaaa bbbbbbbb ", "  cccccccc", ""]
    assert plain("> aaaaaaaa bbbbbbbb cccccccc", 20).split("\n") == ["▌ aaaaaaaa bbbbbbbb ", "▌ cccccccc", ""]


def test_scripts_without_spaces_stream_and_wrap() -> None:
    stream = MarkdownStream(20)
    assert stream.feed("日本") == "日本"
    assert plain("日本語" * 5, 20) == "日本語日本語日本語日\n本語日本語\n"


def test_blocks() -> None:
    assert rendered("## T `x`\ntext") == f"\x1b[1;4mT{RESET}\x1b[1;4m {RESET}\x1b[1;36;4mx{RESET}\ntext\n".replace("1;36;4", "1;4;36")
    assert plain("a\n\n\n\nb\n***\n1. c") == "a\n\nb\n" + "─" * 40 + "\n1. c\n"
    assert plain("#hashtag\n**b**\n---x") == "#hashtag\nb\n---x\n"


def test_code_keeps_every_character_and_colours_strings_over_lines() -> None:
    code = 'def f():\n    """a\n    b * c * d"""\n\n    return "**x**"'
    text = f"```python\n{code}\n```\nafter"
    assert plain(text) == "".join(f"  {line}\n" for line in code.split("\n")) + "after\n"
    second = rendered(text).split("\n")[2]
    assert "\x1b[" in second.split("b * c")[0]
    assert plain("```\na\n``` b\n") == "  a\n  ``` b\n"
    assert plain("~~~nosuchlanguage\n`a`\n~~~") == "  `a`\n"


def test_a_table_comes_out_whole_when_it_is_complete() -> None:
    stream = MarkdownStream(40)
    assert stream.feed("| a | b |\n|---|---|\n| 1 | **2** |\n") == ""
    out = stream.feed("\n")
    assert "1" in out
    assert "**" not in out
    assert out.endswith("\n\n")


MARKUP = st.text(st.sampled_from("ab *_`~#-|>1. \n\\語\t[]()!&;="), max_size=80)


@given(MARKUP, st.integers(1, 9))
def test_the_result_does_not_depend_on_how_the_text_was_cut(text: str, cut: int) -> None:
    assert rendered(text, 30, cut) == rendered(text, 30)


@given(st.text(st.sampled_from("abcdefgh \n"), max_size=200))
def test_no_word_is_lost_or_changed(text: str) -> None:
    assert plain(text, 20).split() == text.split()


@given(MARKUP)
def test_letters_survive_every_markup(text: str) -> None:
    kept = [c for c in plain(text, 200) if c in "ab語"]
    if "```" not in text and "~~~" not in text and "|" not in text:
        assert kept == [c for c in text if c in "ab語"]


BLOCKS = {
    "diff": "--- a/x\n+++ b/x\n@@ -1 +1 @@\n- a\n+ b",
    "make": "all: x\n\tcc -o x x.c",
    "latex": "\\section{One}\n$a^2$ and text",
    "http": "GET /v1/models HTTP/1.1\nHost: localhost",
    "pycon": ">>> 1 + 1\n2\n>>> def f(x):\n...     return x",
    "python": "def f(x):\n    return x",
    "bash": "ls -l | head",
    "sql": "SELECT a FROM b",
}


@pytest.mark.parametrize("language", BLOCKS)
def test_no_line_of_sound_code_is_shown_as_an_error(language):
    text = f"```{language}\n{BLOCKS[language]}\n```\n"
    assert "\x1b[04m\x1b[91m" not in rendered(text), "underlined and red: pygments' Error"
    assert plain(text).splitlines() == [f"  {line.expandtabs(4)}" for line in BLOCKS[language].splitlines()]


def test_a_diff_is_red_and_green():
    removed, added = rendered("```diff\n- a\n+ b\n```\n").splitlines()
    assert removed != added
    assert {removed.strip(), added.strip()} == {"\x1b[91m- a\x1b[39;49;00m", "\x1b[32m+ b\x1b[39;49;00m"}
