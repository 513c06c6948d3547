"""Heads that read the model's hidden rows: they decide how fast an answer comes, never which."""

from functools import cache

import numpy as np
import pytest
from support.heads import HEAD, Prompter, engine_with, model_with_head
from support.tiny_engine import request, run, tiny_engine

from mlxinfer.cache.kv_format import KVFormat

rng = np.random.default_rng(5)
PROMPTS = [rng.integers(3, 96, n).tolist() for n in (2, 60, 63, 64, 130)]
SETTINGS = [
    {},
    {"temperature": 1.0, "seed": 4},
    {"temperature": 1.0, "top_k": 9, "seed": 5, "logprobs": 3},
    {"frequency_penalty": 0.7, "repetition_penalty": 1.2},
    {"temperature": 0.0, "logprobs": 2},
]
LIMITS = [90, 70, 80, 66, 40]


def requests():
    return [request(p, n, **v) for p, n, v in zip(PROMPTS, LIMITS, SETTINGS, strict=True)]


@cache
def plain(name, kv="16"):
    return run(tiny_engine(name, KVFormat.parse(kv), max_draft=0), requests())


@pytest.mark.parametrize(("name", "kv"), [("llama", "16"), ("llama", "4"), ("qwen3_next", "16"), ("gemma3_text", "16")])
def test_a_head_changes_no_answer(name, kv):
    expected, sequences = plain(name, kv), requests()
    engine = engine_with(model_with_head(name, HEAD)[0], kv)
    Prompter(engine, dict(zip(map(tuple, PROMPTS), expected, strict=True)))
    assert run(engine, sequences) == expected
    drafted, accepted = sum(s.drafted_tokens for s in sequences), sum(s.accepted_tokens for s in sequences)
    assert drafted > 150
    assert 0.3 * drafted < accepted < 0.9 * drafted
