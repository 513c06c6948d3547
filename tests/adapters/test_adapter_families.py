"""Adapters on every family: all projections that it has changed at once, and the same merged into its weights."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.models.adapters import random_changes, write_peft
from support.models.families import GOLDEN, NAMES, config, reference
from support.models.plain_weights import PlainWeights
from support.oracles.plain_step import PlainCache

from mlxinfer.adapters.adapted_model import AdaptedModel
from mlxinfer.adapters.files import open_adapter
from mlxinfer.adapters.places import places
from mlxinfer.adapters.update import key_of
from mlxinfer.models import build
from mlxinfer.models.decoder import Decoder, Model
from mlxinfer.nn.packing import settle

USUAL = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"}


def loaded(name: str, changed: dict[str, mx.array] | None = None) -> Decoder:
    weights = PlainWeights(mx.load(str(GOLDEN / name / "model.safetensors")) | (changed or {}))
    model = build(config(name), weights, ready=settle)
    assert isinstance(model, Decoder)
    return model


def logits(model: Model, tokens: list[int]) -> np.ndarray:
    step = PlainCache(model.layers).step([(0, len(tokens))], {0: len(tokens)})
    return np.array(model.logits(model.hidden(mx.array(tokens, mx.int32), step)))


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_all_projections_of_a_family(name, tmp_path: Path):
    model, tokens = loaded(name), reference(name)[0][:24]
    known, stored = places(model), mx.load(str(GOLDEN / name / "model.safetensors"))
    shapes = {tensor: tuple(a.shape) for tensor, a in stored.items() if key_of(tensor.removesuffix(".weight")) in known}
    changes = random_changes(shapes, projections=[""], dora=True, size=0.02)
    kinds = {key.split(".", 2)[2] for key in known}
    assert len(changes) >= len(known) // 2
    adapter = open_adapter("it", write_peft(tmp_path / "adapter", changes), config(name))
    adapted = AdaptedModel(model, [adapter], mx.float32)
    merged = loaded(name, {f"{module}.weight": mx.array(c.merged(np.array(stored[f"{module}.weight"]))) for module, c in changes.items()})
    expected, without = logits(merged, tokens), logits(model, tokens)
    got = logits(adapted.for_rows([(adapted.adapters["it"], len(tokens))]), tokens)
    assert np.abs(expected - without).max() > 1e-2, kinds
    assert np.abs(got - expected).max() < 1e-4 * max(1.0, np.abs(expected).max())
    assert np.array_equal(logits(model, tokens), without)


def test_what_llama_has():
    kinds = {key.split(".", 2)[2] for key in places(loaded("llama"))}
    assert kinds == USUAL | {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
