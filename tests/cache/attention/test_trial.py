"""The trial of the attention kernels runs every variant that a model can use later, and these are few."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import mlx.core as mx
import pytest
from support.models.published_configs import MORE_LAYERS, attention_layers

from mlxinfer.cache.attention import trial
from mlxinfer.cache.attention.metal import METAL
from mlxinfer.cache.base import AttentionParams, AttentionSpec, HeadSteps, Segment
from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.cache.paged import PagedCache
from mlxinfer.kernels_metal.executors import run_with
from mlxinfer.kernels_metal.paged_attention import plan as plans
from mlxinfer.kernels_metal.paged_attention.launcher import combine_template, decode_template
from mlxinfer.kernels_metal.paged_attention.plan import Pools, SegmentRows, plan_decode
from mlxinfer.kernels_metal.paged_attention.tiles import Shape
from tests.support.kernels.recorded_kernels import Recorder, Variant

FORMATS = (KVFormat(), KVFormat(4, 4), KVFormat(8, 3, first16=True))
MOST = 8


SPECS = tuple({trial.kind_of(spec, mx.bfloat16, KVFormat()): spec for spec in attention_layers()}.values())
CASES = [
    pytest.param(
        spec,
        kv,
        id=f"{spec.query_heads}x{spec.kv_heads}x{spec.key_dim}w{spec.window}{'-shared' * spec.shared}-{kv.name}",
        marks=pytest.mark.long if place % len(FORMATS) == index else pytest.mark.slow,
    )
    for place, spec in enumerate(SPECS)
    for index, kv in enumerate(FORMATS)
]
"""All of them, of which each shape is tried with one format in turn; the others are slow."""


@cache
def tried(kind: trial.Kind) -> Recorder:
    recorder = Recorder()
    with run_with(recorder):
        trial._check_decode(*kind)
        trial._check_prefill(*kind)
    return recorder


def planned(spec: AttentionSpec, kv: KVFormat, cores: int) -> set[Variant]:
    """Return the variants that decode can use at any length, number of rows and company."""
    assert spec.query_heads
    shape = Shape(mx.bfloat16, spec.query_heads, spec.kv_heads, spec.key_dim, spec.value_dim, kv.k_bits, kv.v_bits)
    found: set[Variant] = set()
    for pages in (*range(6), 9, 40, 300):
        for count in range(1, 9):
            rows = [SegmentRows(0, 0, count, 64 * pages + 5, list(range(pages))), SegmentRows(1, count, 1, 9, [])]
            for some in (rows, rows[:1]):
                plan = plan_decode(shape, some, Pools(300, 0, 2), query_rows=count + 1, window=spec.window, cores=cores)
                found.add(("paged_attention_decode", decode_template(shape, plan.tile)))
                found |= {("paged_attention_combine", combine_template(shape))} if plan.parts is not None else set()
    return found


def conversation(spec: AttentionSpec, kv: KVFormat, seed: int = 0) -> Recorder:
    """Two sequences that grow by prompts, single tokens and drafts, in layers with and without sinks."""
    recorder, chance = Recorder(), random.Random(seed)
    with run_with(recorder):
        cache = PagedCache([spec], dtype=mx.bfloat16, kv_cache_tokens=1 << 13, chunk=1024, kv=kv, backend=lambda store: METAL)
        slots, past = [cache.open(), cache.open()], [0, 0]
        for _ in range(25):
            segments, start = [], 0
            for slot in slots if chance.random() < 0.5 else slots[:1]:
                count = chance.choice((1, 1, 1, 2, 3, 5, 8, 40, 70)) if past[slot] else 500
                segments.append(Segment(slot, start, count, past[slot], past[slot] + count))
                past[slot] += count
                start += count
            step = cache.begin(segments)
            q = mx.zeros((start, spec.query_heads, spec.key_dim), mx.bfloat16)
            k, v = (mx.zeros((start, spec.kv_heads, dim), mx.bfloat16) for dim in (spec.key_dim, spec.value_dim))
            sinks = mx.zeros((spec.query_heads,), mx.bfloat16) if chance.random() < 0.5 else None
            params = AttentionParams(0.1, softcap=chance.choice((None, 30.0)), sinks=sinks)
            step.attend(0, q, k, v, params)
            if spec.shared:
                step.attend_again(0, q.reshape(start, -1), HeadSteps(), params)
            cache.commit(step)
    return recorder


@pytest.mark.parametrize(("spec", "kv"), CASES)
def test_the_trial_runs_all_that_a_model_can_reach(spec: AttentionSpec, kv: KVFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    in_trial = tried(trial.kind_of(spec, mx.bfloat16, kv))
    assert len(in_trial.variants) <= MOST
    for cores in (7, 32, 128):
        assert planned(spec, kv, cores) <= in_trial.templates
    for cores in (7, 64) if kv.quantized else (64,):
        monkeypatch.setattr(plans, "gpu_cores", lambda cores=cores: cores)
        seen = conversation(spec, kv, seed=cores)
        assert seen.variants <= in_trial.variants
        # Plain MLX answers prompts from shared pages.
        assert len(seen.variants) >= (5 if kv.quantized and not spec.shared else 3)
        assert max(seen.most_threads, in_trial.most_threads) <= 256


@pytest.mark.parametrize("cores", [7, 10, 128])
def test_its_variants_are_the_same_on_every_chip(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = trial.kind_of(MORE_LAYERS["llama-70b"], mx.bfloat16, KVFormat(4, 4))
    monkeypatch.setattr(plans, "gpu_cores", lambda: cores)
    recorder = Recorder()
    with run_with(recorder):
        trial._check_decode(*kind)
        trial._check_prefill(*kind)
    assert recorder.variants == tried(kind).variants


@pytest.mark.parametrize("window", [1, 64, 65, 66, 128, 194, 4096])
@pytest.mark.parametrize("heads", [1, 4])
def test_windows_of_all_sizes(window: int, heads: int) -> None:
    """Sequences with short windows may never be divided; if one is, the trial has a divided one."""
    spec = AttentionSpec(1, 64, 64, window, query_heads=heads)
    in_trial = tried(trial.kind_of(spec, mx.bfloat16, KVFormat()))
    shape = Shape(mx.bfloat16, heads, 1, 64, 64, 16, 16)
    for past in range(0, 3 * window + 300, max(window // 50, 1)):
        for count in (1, min(8, 64 - past % 64)):
            rows = SegmentRows(0, 0, count, past, list(range(past // 64)))
            plan = plan_decode(shape, [rows], Pools(past // 64, 0, 1), query_rows=count, window=window, cores=64)
            assert plan.parts is None or ("paged_attention_combine", combine_template(shape)) in in_trial.templates


def test_layers_that_share_variants_share_a_trial() -> None:
    spec = AttentionSpec(8, 128, 128, query_heads=32)
    kinds = {trial.kind_of(s, mx.bfloat16, KVFormat()) for s in (spec, replace(spec, kv_heads=2, query_heads=8))}
    assert len(kinds) == 1
    assert len({trial.kind_of(replace(spec, window=w), mx.bfloat16, KVFormat()) for w in (512, 1024, 4096)}) == 1
