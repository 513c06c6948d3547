"""Whole blocks as one operation of the CPU kernels, against the same blocks operation by operation."""

import json

import mlx.core as mx
import numpy as np
import pytest
from support.engines.tiny_engine import GOLDEN
from support.models.plain_weights import PlainWeights

from mlxinfer import kernels_cpu
from mlxinfer.cache.base import Segment
from mlxinfer.cache.paged import PagedCache
from mlxinfer.cache.step import CacheStep
from mlxinfer.models import build
from mlxinfer.models.families import glm4, qwen
from mlxinfer.nn.activations import ScaledGate, gated
from mlxinfer.nn.packing import settle

pytestmark = pytest.mark.skipif(not kernels_cpu.in_use(), reason=kernels_cpu.status())

WHOLE = sorted(folder.name for folder in GOLDEN.iterdir())
STEPS = [[(0, 70), (1, 3)], [(0, 1), (1, 1), (2, 130)], [(1, 61), (0, 60)], [(2, 1)], [(0, 1), (1, 1), (2, 1)]]
"""(sequence, tokens) of the segments of each step: pages fill alone, together, several at once, and not at all."""


def model_of(name):
    folder = GOLDEN / name
    config = json.loads((folder / "config.json").read_text())
    return build(config, PlainWeights.open(folder / "model.safetensors"), ready=settle)


def logits_of(model):
    """Of every step, and the pages that are left."""
    cache = PagedCache(model.layers, dtype=mx.float32, kv_cache_tokens=4096, chunk=256)
    slots, past, found = [cache.open() for _ in range(3)], [0, 0, 0], []
    for parts in STEPS:
        segments, start = [], 0
        for sequence, count in parts:
            segments.append(Segment(slots[sequence], start, count, past[sequence], past[sequence] + count))
            past[sequence] += count
            start += count
        step = cache.begin(segments)
        tokens = mx.array((np.arange(start) * 7 + len(found)) % 96, mx.int32)
        logits = model.logits(model.hidden(tokens, step))
        mx.eval(step.state, logits)
        found.append(np.array(logits))
        cache.commit(step)
    return found


@pytest.mark.parametrize("name", WHOLE)
def test_whole_blocks_compute_the_same(name, monkeypatch):
    model = model_of(name)
    assert all(run.native is not None for run in model.runs)
    whole = logits_of(model)
    monkeypatch.setattr(CacheStep, "runs_blocks", False)
    near = 1e-4 if name.startswith("gemma4") else 1e-5  # its scores are not scaled, so that exp makes more of what rounding leaves
    for ours, theirs in zip(whole, logits_of(model), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=near, atol=near)


def scaled(name):
    plain = gated(name)
    return ScaledGate(plain.activation, 0.5, 3.0, lambda gate, up: plain(gate * 0.5, up) * 3)


@pytest.mark.parametrize("family", [qwen, glm4])
def test_the_last_factor_of_a_gate_is_kept(family, monkeypatch):
    monkeypatch.setattr(family, "gated", scaled)
    model = model_of("qwen3" if family is qwen else "glm4")
    assert all(run.native is not None for run in model.runs)
    whole = logits_of(model)
    monkeypatch.setattr(CacheStep, "runs_blocks", False)
    for ours, theirs in zip(whole, logits_of(model), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_experts_whose_gate_has_a_last_factor_run_operation_by_operation(monkeypatch):
    assert model_of("qwen3_moe").runs[-1].native is not None
    monkeypatch.setattr(qwen, "gated", scaled)
    assert model_of("qwen3_moe").runs[-1].native is None


def test_a_step_whose_result_nobody_wants_still_fills_its_pages():
    model = model_of("llama")
    cache = PagedCache(model.layers, dtype=mx.float32, kv_cache_tokens=512, chunk=64)
    step = cache.begin([Segment(cache.open(), 0, 5, 0, 5)])
    model.hidden(mx.arange(5, dtype=mx.int32), step)
    mx.eval(step.state)
    assert all(np.array(cache._stores[layer].open[0])[0, :, :5].any(axis=-1).all() for layer in range(len(model.layers)))


def test_blocks_that_do_not_fit_are_refused():
    program = kernels_cpu.Program(64, mx.float32)
    with pytest.raises(ValueError, match="one block at least"):
        program.finish()
    program.multiply(program.stream, kernels_cpu.ProgramProjection(kernels_cpu.pack(mx.zeros((64, 32)))), "part")
    with pytest.raises(ValueError, match=r"\[blocks\]"):
        program.finish()
