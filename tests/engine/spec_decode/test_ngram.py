"""The n-gram index finds the result of a search through all tokens."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxinfer.engine.spec_decode.ngram import NgramIndex


def followed(tokens):
    """(position of the longest earlier n-gram of the last tokens, length of the match)."""
    for n in (4, 3, 2):
        places = [p for p in range(n, len(tokens)) if tokens[p - n : p] == tokens[-n:]]
        if len(tokens) >= 4 and places:
            place, run = places[-1], n
            while run < min(32, place) and tokens[place - 1 - run] == tokens[len(tokens) - 1 - run]:
                run += 1
            return place, run
    return None


@given(st.lists(st.integers(0, 3), max_size=120), st.integers(0, 120), st.integers(1, 9))
def test_every_proposal_goes_on_as_it_went_on_before(tokens, prompt, chunk):
    known = tokens[:prompt]
    index = NgramIndex(known, 200)
    while index.known < len(known):
        index.extend(chunk)
    for token in tokens[prompt:]:
        foretold = index.continuation(1) if index.run else None
        known.append(token)
        assert index.add() is (None if foretold is None else foretold == [token])
        if index.run:
            run = min(index.run, index.pointer, 32)
            assert run >= 2
            assert known[index.pointer - run : index.pointer] == known[len(known) - run :]


@given(st.lists(st.integers(0, 4), min_size=4, max_size=80))
def test_a_prompt_is_searched_from_its_end(tokens):
    index = NgramIndex(tokens, 4096)
    index.extend(1000)
    found = followed(tokens)
    if found and index.run:
        assert index.run <= found[1] or index.pointer <= found[0]
    assert bool(index.run) <= bool(found)


def test_a_repetition_is_found_and_goes_round():
    tokens = [7, 1, 2, 3, 4, 5, 9, 1, 2, 3]
    index = NgramIndex(tokens, 64)
    index.extend(100)
    assert index.continuation(3) == [4, 5, 9]
    assert index.continuation(8) == [4, 5, 9, 1, 2, 3, 4, 5]


def test_nothing_is_foretold_where_nothing_repeats():
    tokens = list(range(500))
    index = NgramIndex(tokens, 1000)
    index.extend(500)
    for token in range(500, 900):
        tokens.append(token)
        assert index.add() is None
    assert index.continuation(4) == []


@pytest.mark.parametrize("module", ["ngram", "acceptance", "proposer"])
def test_no_mlx(module):
    script = f"import sys, mlxinfer.engine.spec_decode.{module}; print(*{{'mlx', 'numpy'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not done.stdout.split()
