"""Images with what else the engine does: pages of fewer bits, drafts, heads, schemas."""

from __future__ import annotations

import json
from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from support.engines.drafting import Free, Guesser
from support.models.heads import Prompter
from support.models.seeing import GOLDEN, cases, seeing, seeing_engine
from support.vision.table import NAMES, answers, error, logits_in, messages_with_pictures, prompt, sees, text_request

from mlxinfer import LLM, Schema
from mlxinfer.cache.base import AttentionSpec
from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.config import EngineConfig
from mlxinfer.engine.core.engine import Engine
from mlxinfer.loading.load import LoadedModel, load

SAME = 5e-5
"""Two ways to compute the same in float32."""
NO_HEAD = dict.fromkeys([name for name in NAMES if not name.startswith("qwen3_5")], "the family's checkpoints have no head for drafts")


@pytest.mark.long
@sees("cache in 8 and 4 bits")
def test_fewer_bits(name: str) -> None:
    """The same in chunks and at once, alone and beside others, and worse with fewer bits."""
    asked, losses = prompt(name, "two").behind(40), []
    same = 10 * SAME if name == "ministral3" else SAME  # whose queries grow with the position, and round otherwise
    exact = logits_in(seeing_engine(name), asked)
    for bits in (8, 4):
        kv = KVFormat(bits, bits)
        whole = logits_in(seeing_engine(name, kv, max_num_batched_tokens=512), asked)
        assert error(logits_in(seeing_engine(name, kv, max_num_batched_tokens=24), asked), whole) < same, bits
        alone = answers(seeing_engine(name, kv), asked.request())
        assert answers(seeing_engine(name, kv, max_num_batched_tokens=24), text_request(), asked.request())[1:] == alone, bits
        losses.append(np.abs(whole - exact).mean())
    quantizable = any(isinstance(s, AttentionSpec) and KVFormat.can_quantize(s) for s in seeing(name).model.layers)
    assert 0 < losses[0] < losses[1] < 0.5 if quantizable else losses == [0, 0]


@sees("n-gram drafts")
def test_drafts_right_and_wrong_change_nothing(name: str) -> None:
    """Those of an n-gram search, or of any other guess."""
    given = [case for case, found in cases(name).items() if found.pictures]
    requests = [prompt(name, case).request() for case in given]
    engine, expected = seeing_engine(name), [cases(name)[case].greedy for case in given]
    engine.proposer.times, engine.proposer.account.share = Free(), 1e9
    Guesser(engine.proposer, {tuple(s.prompt): answer for s, answer in zip(requests, expected, strict=True)}, 3)
    assert answers(engine, *requests) == expected
    assert sum(s.drafted_tokens for s in requests) > 0


@cache
def _with_head(name: str) -> LoadedModel:
    return load(GOLDEN / name, dtype="float32", mtp=True)


@pytest.mark.long
@sees("its own head", excused=NO_HEAD)
def test_a_head_changes_nothing(name: str) -> None:
    """The checkpoint's head for drafts, some of whose drafts are right."""
    given = [case for case, found in cases(name).items() if found.pictures]
    requests = [prompt(name, case).request() for case in given]
    config = EngineConfig(max_context=1024, kv_cache_tokens=8192, max_num_batched_tokens=64, max_num_seqs=8)
    engine = Engine(_with_head(name).model, config, dtype=mx.float32, vision=seeing(name).vision)
    engine.proposer.times, engine.proposer.account.share = Free(), 1e9
    assert engine.proposer.draft is not None
    engine.proposer.draft.cost = 1e-4
    expected = [cases(name)[case].greedy for case in given]
    Prompter(engine, {tuple(s.prompt): answer for s, answer in zip(requests, expected, strict=True)})
    assert answers(engine, *requests) == expected
    assert sum(s.drafted_tokens for s in requests) > 5
    assert sum(s.accepted_tokens for s in requests) > 0


@sees("JSON schema")
def test_answers_of_a_schema(name: str) -> None:
    schema = {"type": "object", "properties": {"shape": {"enum": ["circle", "square", "line"]}}, "required": ["shape"]}
    with LLM(GOLDEN / name, dtype="float32", memory_gb=1, max_context=512) as llm:
        answer = llm.chat(
            messages_with_pictures(name, "two"), temperature=0, max_tokens=256, structure=Schema({**schema, "additionalProperties": False})
        )
    assert json.loads(answer.text)["shape"] in ("circle", "square", "line")
    assert answer.usage.stats.images == 2
