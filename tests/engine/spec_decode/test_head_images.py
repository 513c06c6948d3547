"""A head that drafts after images: its rows turn by the positions of the answer, and no answer changes."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from support.engines.drafting import Free
from support.engines.tiny_engine import run
from support.models.heads import HeadWeights
from support.models.image_prompts import GOLDEN, config_of
from support.models.plain_weights import PlainWeights, RandomWeights
from support.models.seeing import case_request, cases, seeing

from mlxinfer.cache.base import Segment, Step
from mlxinfer.config import EngineConfig
from mlxinfer.engine.core.engine import Engine
from mlxinfer.models import build
from mlxinfer.models.decoder import Decoder
from mlxinfer.nn.packing import settle


class WithHead(HeadWeights):
    """The tensors of a golden checkpoint that sees, with a head of random weights."""

    def __init__(self, family: str) -> None:
        held = mx.load(str(GOLDEN / family / "model.safetensors"))
        assert isinstance(held, dict)
        self.plain = PlainWeights({name: tensor.astype(mx.float32) for name, tensor in held.items()})
        self.random, self.head = RandomWeights(tied=True), "mtp."


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_drafts_turn_by_positions_and_change_no_answer(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(config_of(family), WithHead(family), mtp=True, ready=settle)
    assert model.mtp is not None
    segments: list[Segment] = []
    draft = Decoder.draft

    def recorded(self: Decoder, tokens: mx.array, before: mx.array, step: Step) -> Any:
        segments.extend(step.segments)
        return draft(self, tokens, before, step)

    monkeypatch.setattr(Decoder, "draft", recorded)
    config = EngineConfig(max_context=1024, kv_cache_tokens=4096, max_num_batched_tokens=64, max_num_seqs=4)
    engine = Engine(model, config, dtype=mx.float32, vision=seeing(family).vision)
    engine.proposer.times, engine.proposer.account.share = Free(), 1e9
    requests = [case_request(name, family=family) for name in ("one", "two", "text")]
    shifts = [0 if request.images is None else request.images.shift for request in requests]
    assert run(engine, requests) == [cases(family)[name].greedy for name in ("one", "two", "text")]
    drafted = {shift for shift, request in zip(shifts, requests, strict=True) if request.drafted_tokens}
    assert len(drafted) > 1
    assert {segment.shift for segment in segments} == drafted
