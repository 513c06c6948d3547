"""Sampling parameters without a meaning are refused, by name."""

import math

import pytest

from mlxinfer import SamplingParams
from mlxinfer.errors import SamplingError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("min_p", 1.01),
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("n", 0),
        ("logprobs", -1),
        ("logprobs", 10_000),
        ("seed", 1.5),
        ("seed", 2**70),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("presence_penalty", math.nan),
        ("frequency_penalty", None),
        ("stop", ""),
        ("stop", ["ok", ""]),
        ("stop", 3),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", "12"),
        ("logit_bias", {"a": 1.0}),
        ("logit_bias", {3: math.nan}),
        ("logit_bias", {3: 1000}),
        ("logit_bias", [1, 2]),
        ("ignore_eos", "yes"),
    ],
)
def test_nonsense_is_named(field, value):
    with pytest.raises(SamplingError, match=field) as caught:
        SamplingParams(**{field: value})
    assert "\n" not in str(caught.value)


def test_spellings_are_made_one():
    assert SamplingParams(stop="a").stop == ("a",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams().stop == ()
    assert SamplingParams(logit_bias={1: 2}).logit_bias == {1: 2.0}
    assert SamplingParams(top_k=-1).top_k == -1
