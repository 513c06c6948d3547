from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mlxinfer.engine.text.stopping import StopStrings

LETTERS = st.text("ab", max_size=12)


def feed(stops: list[str], chunks: list[str]) -> tuple[list[str], bool, str]:
    """Return (text of each chunk, True if a stop string was found, text held back to the end)."""
    machine = StopStrings(stops)
    emitted, stopped = [], False
    for chunk in chunks:
        text, stopped = machine.add(chunk)
        emitted.append(text)
    return emitted, stopped, machine.finish()


def cut(text: str, stops: list[str]) -> tuple[str, bool]:
    """Return the text before the first completed stop string; of several that end together, the one that starts first counts."""
    for end in range(1, len(text) + 1):
        begins = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if begins:
            return text[: min(begins)], True
    return text, False


@given(st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.lists(LETTERS, max_size=8))
@example(["aab"], ["a", "a", "a", "b"])
@example(["ab", "b"], ["a", "b"])
def test_cuts_before_the_first_stop_wherever_chunks_end(stops: list[str], chunks: list[str]) -> None:
    emitted, stopped, held = feed(stops, chunks)
    assert ("".join(emitted) + held, stopped) == cut("".join(chunks), stops)


@given(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.lists(LETTERS, max_size=8))
def test_holds_back_no_more_than_a_beginning_of_a_stop(stops: list[str], chunks: list[str]) -> None:
    _, stopped, held = feed(stops, chunks)
    assert not stopped or not held
    assert not held or any(stop.startswith(held) and stop != held for stop in stops)


def test_text_after_the_stop_is_dropped() -> None:
    assert feed(["END"], ["one E", "N", "D two", "three"]) == (["one ", "", "", ""], True, "")


def test_text_that_only_looked_like_a_stop_comes_out() -> None:
    assert feed(["</s>"], ["a<", "/", "p>"]) == (["a", "", "</p>"], False, "")


@given(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.lists(LETTERS, max_size=8))
def test_tells_which_stop_it_was(stops: list[str], chunks: list[str]) -> None:
    machine = StopStrings(stops)
    shown = "".join(machine.add(chunk)[0] for chunk in chunks)
    assert (machine.met is not None) == cut("".join(chunks), stops)[1]
    assert machine.met is None or (machine.met in stops and "".join(chunks).startswith(shown + machine.met))


@pytest.mark.parametrize("stops", [[], [""]])
def test_without_stop_strings_everything_passes(stops: list[str]) -> None:
    assert feed(stops, ["a", "b"]) == (["a", "b"], False, "")
