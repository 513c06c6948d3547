"""Adapters together with what else a step can have: heads that draft, vectors, hooks, structures, every family's layers in a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.engines.drafting import Free
from support.engines.tiny_engine import request, run, tiny_model
from support.models.adapters import random_changes, write_peft
from support.models.families import GOLDEN, NAMES, config, reference
from support.models.heads import HEAD, Prompter, model_with_head
from support.models.plain_weights import PlainWeights
from support.oracles.plain_step import PlainCache

from mlxinfer.adapters.adapted_model import AdaptedModel, LoadedAdapter
from mlxinfer.adapters.files import open_adapter
from mlxinfer.adapters.places import places
from mlxinfer.adapters.update import key_of
from mlxinfer.cache.disk.storage import DiskStorage
from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.config import EngineConfig
from mlxinfer.engine.core.engine import Engine
from mlxinfer.engine.core.sequence import Sequence
from mlxinfer.interpret.interventions import steering
from mlxinfer.models import build
from mlxinfer.models.decoder import Model
from mlxinfer.nn.packing import settle

Named = tuple[str | None, list[int]]


def with_adapters(model: Model, name: str, folder: Path) -> AdaptedModel:
    """Two adapters, a and b, for every second projection each, so that some matrices are changed by one alone."""
    known, stored = places(model), mx.load(str(GOLDEN / name / "model.safetensors"))
    shapes = {tensor: tuple(a.shape) for tensor, a in sorted(stored.items()) if key_of(tensor.removesuffix(".weight")) in known}
    halves = {"a": dict(list(shapes.items())[:-2]), "b": dict(list(shapes.items())[1:])}
    found = [
        open_adapter(which, write_peft(folder / which, random_changes(half, seed, projections=[""], size=0.05)), config(name))
        for seed, (which, half) in enumerate(halves.items())
    ]
    return AdaptedModel(model, found, mx.float32)


def logits(model: AdaptedModel, parts: list[Named]) -> list[np.ndarray]:
    rows = [(None if name is None else model.adapters[name], len(tokens)) for name, tokens in parts]
    step = PlainCache(model.adapted.layers).step([(slot, len(tokens)) for slot, (_, tokens) in enumerate(parts)])
    graph, flat = model.for_rows(rows), [token for _, tokens in parts for token in tokens]
    y = np.array(graph.logits(graph.hidden(mx.array(flat, mx.int32), step)))
    return np.split(y, np.cumsum([len(tokens) for _, tokens in parts])[:-1])


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_batch_of_every_family(name: str, tmp_path: Path):
    """Prompts of different lengths, single tokens, and rows without an adapter between them."""
    model, tokens = build(config(name), PlainWeights.open(GOLDEN / name / "model.safetensors"), ready=settle), reference(name)[0]
    adapted = with_adapters(model, name, tmp_path)
    parts: list[Named] = [("a", tokens[:7]), (None, tokens[3:12]), ("b", tokens[5:10]), ("a", tokens[9:10]), ("b", tokens[9:10])]
    alone = [logits(adapted, [part])[0] for part in parts]
    for mine, expected in zip(logits(adapted, parts), alone, strict=True):
        assert np.abs(mine - expected).max() < 2e-5 * max(1.0, np.abs(expected).max())
    assert np.abs(alone[3] - alone[4]).max() > 1e-3


rng = np.random.default_rng(9)
PROMPTS = [rng.integers(3, 96, n).tolist() for n in (60, 9, 130)]
WHICH = ("a", None, "b")


def asked(adapters: Mapping[str, LoadedAdapter], **params: object) -> list[Sequence]:
    found = [request(prompt, 40, **params) for prompt in PROMPTS]
    for sequence, which in zip(found, WHICH, strict=True):
        sequence.adapter = None if which is None else adapters[which]
    return found


def engine(model: Model, adapted: AdaptedModel, kv: str = "16", **settings: object) -> Engine:
    values = {"max_context": 256, "kv_cache_tokens": 4096, "max_num_batched_tokens": 64, "max_num_seqs": 8, "ngrams": False} | settings
    made = Engine(model, EngineConfig(**values), dtype=mx.float32, kv=KVFormat.parse(kv), adapted=adapted)
    made.proposer.times, made.proposer.account.share = Free(), 1e9
    return made


@pytest.mark.long
@pytest.mark.parametrize(("name", "kv"), [("llama", "16"), ("llama", "4"), ("qwen3_5_text", "16")])
def test_a_head_changes_no_adapters_answer(name: str, kv: str, tmp_path: Path):
    """Found prefixes and pages that run out included."""
    model = model_with_head(name, HEAD if name == "llama" else True)[0]
    adapted = with_adapters(model, name, tmp_path)
    expected = run(engine(model, adapted, kv, max_draft=0), asked(adapted.adapters))
    assert len({tuple(each) for each in expected}) == 3
    made = engine(model, adapted, kv, kv_cache_tokens=512)
    made.proposer.draft.cost = 1e-4
    Prompter(made, dict(zip(map(tuple, PROMPTS), expected, strict=True)))
    for _ in range(2):
        sequences = asked(adapted.adapters)
        assert run(made, sequences) == expected
        assert 0 < sum(s.accepted_tokens for s in sequences) < sum(s.drafted_tokens for s in sequences)
    assert sum(s.reused_tokens for s in sequences)


def test_hooks_and_adapters_in_one_step(tmp_path: Path) -> None:
    """Steered with and without an adapter, next to the same unsteered: each answers as alone."""
    model = tiny_model("llama")
    adapted = with_adapters(model, "llama", tmp_path)
    hooks = steering(model, 1, mx.array(rng.normal(0, 3, 48).astype(np.float32)), 1.0, None)

    def four() -> list[Sequence]:
        found = [request(PROMPTS[1], 20) for _ in range(4)]
        for i, sequence in enumerate(found):
            sequence.hooks = hooks if i % 2 else None
            sequence.adapter = adapted.adapters["a"] if i > 1 else None
        return found

    alone = [run(engine(model, adapted), [sequence])[0] for sequence in four()]
    assert len({tuple(answer) for answer in alone}) == 4
    assert run(engine(model, adapted), four()) == alone


def test_an_adapters_pages_on_disk_are_its_own(tmp_path: Path) -> None:
    """After a restart, an adapter's stored prefixes are found for it under any name, and for no other adapter."""
    model = tiny_model("llama")
    changed = with_adapters(model, "llama", tmp_path)

    def restarted(which: str | None) -> tuple[list[int], int]:
        disk = DiskStorage(tmp_path / "pages", 10**8)
        made = Engine(model, EngineConfig(max_context=256, kv_cache_tokens=2048), dtype=mx.float32, disk=disk, adapted=changed)
        sequence = request(PROMPTS[2], 8)
        sequence.adapter = None if which is None else replace(changed.adapters[which], name="renamed")
        (answer,) = run(made, [sequence])
        made.close()
        return answer, sequence.reused_tokens

    first = [restarted(which) for which in (None, "a", "b")]
    again = [restarted(which) for which in (None, "a", "b")]
    assert [answer for answer, _ in again] == [answer for answer, _ in first]
    assert [reused for _, reused in first] == [0, 0, 0]
    assert all(reused >= 128 for _, reused in again)
