"""Drafts beside images: n-grams and the model's own head draft, a separate draft model sees no image."""

from __future__ import annotations

import json
from typing import Any

import mlx.core as mx
import pytest
from support.engines.drafting import Free
from support.engines.tiny_engine import run
from support.models.heads import HeadWeights
from support.models.plain_weights import PlainWeights, RandomWeights
from support.models.seeing import GOLDEN, case_request, cases, seeing, seeing_engine

from mlxinfer.config import EngineConfig
from mlxinfer.engine.core.engine import Engine
from mlxinfer.engine.core.sequence import Sequence
from mlxinfer.engine.spec_decode.draft_model import Drafter
from mlxinfer.engine.spec_decode.proposer import _before_images
from mlxinfer.models import build
from mlxinfer.types import SamplingParams

NAMES = sorted(cases())
TEXT = [7, 31, 5, 100, 42, 9, 9, 250, 3]


def eager(engine: Engine) -> Engine:
    """Draft whatever it costs."""
    engine.proposer.times, engine.proposer.account.share = Free(), 1e9
    return engine


def text_request(limit: int = 40) -> Sequence:
    return Sequence(list(TEXT), SamplingParams(temperature=0.0), 0, len(TEXT) + limit)


def test_ngram_drafts_never_have_placeholders_and_change_no_answer() -> None:
    engine, proposed = eager(seeing_engine()), []
    placeholder = seeing().vision.processor.image_token_id
    plain = [run(seeing_engine(max_draft=0), [case_request(name, 60)])[0] for name in NAMES]
    sequences = [case_request(name, 60) for name in NAMES]
    for sequence in sequences:
        engine.add(sequence)
    while not engine.idle:
        engine.step()
        proposed += [token for s in sequences if isinstance(s.drafts, list) for token in s.drafts]
    assert [s.answer for s in sequences] == plain
    assert sum(s.accepted_tokens for s in sequences) > 0
    assert placeholder not in proposed


def test_a_continuation_ends_before_a_placeholder() -> None:
    sequence = case_request("one")
    assert sequence.images is not None
    first = sequence.images.runs[0].start
    own = sequence.prompt[first - 3 : first + 4]
    assert _before_images(sequence, own) == own[:3]
    assert _before_images(sequence, own[:3]) == own[:3]


def test_a_draft_model_drafts_for_text_only() -> None:
    model = seeing().model
    settings: dict[str, Any] = {"drafter": Drafter(model, mx.float32, 0.0001), "ngrams": False}
    engine = eager(seeing_engine(**settings))
    sequences = [text_request(), *map(case_request, NAMES), text_request()]
    answers = run(engine, sequences)
    assert answers[1:-1] == [cases()[name].greedy for name in NAMES]
    assert answers[0] == answers[-1] == run(seeing_engine(), [text_request()])[0]
    assert [s.drafted_tokens > 0 for s in sequences] == [True, *(False for _ in NAMES), True]


@pytest.mark.parametrize("params", [{"repetition_penalty": 1.3}, {"frequency_penalty": 0.8, "temperature": 0.9, "seed": 4}])
def test_penalties(params: dict[str, Any]) -> None:
    alone = [run(seeing_engine(max_draft=0), [case_request(name, **params)])[0] for name in NAMES]
    assert run(eager(seeing_engine(max_num_batched_tokens=20)), [case_request(name, **params) for name in NAMES]) == alone


class _WithHead(HeadWeights):
    """A golden checkpoint that sees, with a head of random weights."""

    def __init__(self, family: str) -> None:
        self.plain = PlainWeights.open(GOLDEN / family / "model.safetensors")
        self.random = RandomWeights(tied=True)
        self.head = "mtp."


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_the_own_head_drafts_after_images(family: str) -> None:
    """It reads the features of image rows and the shifted positions of the answer. Wrong drafts are taken back."""
    config = json.loads((GOLDEN / family / "config.json").read_text(encoding="utf-8"))
    model = build(config, _WithHead(family), mtp=True)
    assert model.mtp is not None
    names = sorted(name for name, case in cases(family).items() if case.pictures)
    settings = EngineConfig(max_context=1024, kv_cache_tokens=8192, max_num_batched_tokens=48, max_num_seqs=4, ngrams=False)
    engine = eager(Engine(model, settings, dtype=mx.float32, vision=seeing(family).vision))
    engine.proposer.draft.cost = 1e-4  # type: ignore[union-attr]
    sequences = [case_request(name, family=family) for name in names]
    assert run(engine, sequences) == [cases(family)[name].greedy for name in names]
    assert all(s.images is not None and s.images.shift < 0 < s.drafted_tokens for s in sequences)
