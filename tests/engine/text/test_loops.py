"""Answers that repeat themselves: the detector against every distance at once, and through the library, the server and the commands."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.models.tiny_directory import tiny_directory

from mlxinfer import LLM, SamplingParams
from mlxinfer.config import chat_params
from mlxinfer.engine.text.stopping import COPIES, LONGEST, SHORTEST, LoopDetector
from mlxinfer.errors import SamplingError


def first_loop(tokens: list[int]) -> int | None:
    """The number of tokens at the end of the first loop, found with every distance."""
    for count in range(1, len(tokens) + 1):
        for size in range(SHORTEST, min(LONGEST, count // COPIES) + 1):
            last = tokens[count - COPIES * size : count]
            if last[size:] == last[:-size]:
                return count
    return None


def found(tokens: list[int]) -> int | None:
    detector = LoopDetector()
    return next((count for count, token in enumerate(tokens, 1) if detector.add(token)), None)


@pytest.mark.parametrize("size", [1, 2, 7, 10, 19, 20, 21, 40, 133, 512])
def test_five_copies_end_at_their_last_token(size: int) -> None:
    """What is shorter than 20 tokens counts as part of a multiple."""
    rng = random.Random(size)
    start, copy = [rng.randrange(1000) for _ in range(50)], [1000 + rng.randrange(1000) for _ in range(size)]
    length = COPIES * -(-SHORTEST // size) * size
    tokens = start + copy * (length // size)
    assert found(tokens) == len(tokens) == first_loop(tokens)
    assert found(tokens[:-1]) is None


def test_longer_repetitions_four_copies_and_interruptions_are_none() -> None:
    rng = random.Random(0)
    assert found([rng.randrange(10**6) for _ in range(LONGEST + 1)] * 6) is None
    copy = [rng.randrange(1000) for _ in range(30)]
    assert found(copy * 4 + [5000] + copy * 4) is None
    assert found(([*copy, 5000]) * 2 + ([*copy, 5001]) * 4) is None


@given(st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=45), st.integers(1, 9)), max_size=12))
def test_as_with_every_distance(parts: list[tuple[list[int], int]]) -> None:
    tokens = [token for part, times in parts for token in part * times][:600]
    assert found(tokens) == first_loop(tokens)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(tiny_directory(tmp_path_factory.mktemp("model"))) as llm:
        yield llm


def test_an_answer_ends_with_the_fifth_copy(llm: LLM) -> None:
    """A bias makes one token certain; the loop is 20 of it, five times."""
    looping = SamplingParams(temperature=0, max_tokens=150, logit_bias={40: 100}, ignore_eos=True)
    whole = llm.generate("a", looping)[0]
    assert (whole.finish_reason, len(whole.token_ids)) == ("length", 150)
    ended = llm.generate(["a", "b"], looping, stop_on_loop=True)
    assert [(each.finish_reason, len(each.token_ids), each.usage.completion_tokens) for each in ended] == [("loop", 100, 100)] * 2
    assert whole.text.startswith(ended[0].text)
    chunks = [*llm.stream("a", looping, stop_on_loop=True)]
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["loop"]
    assert "".join(chunk.text for chunk in chunks) == ended[0].text
    assert llm.stats().running == 0


def test_defaults_are_off_for_programs_and_on_for_people(llm: LLM) -> None:
    assert llm.default_params.stop_on_loop is False
    assert chat_params(llm.default_params).stop_on_loop is True
    assert SamplingParams().resolved(chat_params(llm.default_params)).stop_on_loop is True
    assert SamplingParams(stop_on_loop=False).resolved(chat_params(llm.default_params)).stop_on_loop is False
    with pytest.raises(SamplingError, match="stop_on_loop must be true or false"):
        SamplingParams(stop_on_loop=1)  # type: ignore[arg-type]
