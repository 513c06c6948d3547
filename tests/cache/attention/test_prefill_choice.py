"""Many rows over a quantized past by MLX's attention, which reads a dequantized copy: the same rows, if the rule allows it."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import pytest
from support.kernels.emulated import emulated
from support.oracles.cache_sequences import Sequence, run_step

from mlxinfer.cache.attention import prefill_choice as prefill_way
from mlxinfer.cache.attention.metal import METAL
from mlxinfer.cache.base import AttentionSpec
from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.cache.paged import PagedCache
from mlxinfer.kernels_metal import emulator
from mlxinfer.kernels_metal.paged_attention.tiles import Shape

SPECS = (AttentionSpec(2, 64, 64, query_heads=6), AttentionSpec(1, 64, 64, 70, query_heads=2), AttentionSpec(1, 80, 64, query_heads=1))
SHAPE = Shape(mx.bfloat16, 32, 8, 128, 128, 4, 4)


@pytest.mark.emulator
@pytest.mark.parametrize("kv", [pytest.param(KVFormat(8, 4), marks=pytest.mark.slow), KVFormat(5, 8, first16=True)], ids=lambda kv: kv.name)
def test_rows_are_those_of_the_formats_meaning(kv: KVFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    """Covers pages that fill in a step, earlier pages, and rows that other kernels compute."""
    monkeypatch.setattr(prefill_way, "unsealing_is_faster", lambda shape: True)
    monkeypatch.setattr(prefill_way, "LEAST_ROWS", 20)
    with emulated(), emulator.count_bytes() as counts:
        cache = PagedCache(SPECS, dtype=mx.float32, kv_cache_tokens=1 << 12, chunk=512, kv=kv, backend=lambda store: METAL)
        first, second = (Sequence(seed, 300, kv, SPECS) for seed in (1, 2))
        slots = cache.open(), cache.open()
        for one, other in ((130, 0), (62, 10), (70, 1), (1, 64), (0, 60), (20, 130)):
            run_step(cache, [(s, slot, n) for s, slot, n in zip((first, second), slots, (one, other), strict=True) if n])
    kernels = [launch.kernel for launch in counts.launches]
    assert kernels.count("unseal_pages") == 2 * 7
    assert "paged_attention_prefill" in kernels
    assert "paged_attention_decode" in kernels


def test_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Shape] = []
    monkeypatch.setattr(prefill_way, "unsealing_is_faster", lambda shape: not asked.append(shape))
    monkeypatch.setattr(prefill_way, "most_unsealed_bytes", lambda: 2**27)
    assert prefill_way.may_unseal(SHAPE, 30000, 512, softcap=None)
    assert asked == [SHAPE]
    assert not prefill_way.may_unseal(SHAPE, 33000, 512, softcap=None)  # of 128 MB
    assert not prefill_way.may_unseal(SHAPE, 30000, 255, softcap=None)
    assert not prefill_way.may_unseal(SHAPE, 30000, 512, softcap=30.0)
    assert not prefill_way.may_unseal(replace(SHAPE, key_dim=256, value_dim=256), 3000, 512, softcap=None)
    assert asked == [SHAPE]


@pytest.mark.skipif(mx.metal.is_available(), reason="there is a GPU")
def test_nothing_is_measured_without_a_gpu() -> None:
    assert not prefill_way.unsealing_is_faster(SHAPE)


@pytest.mark.emulator
def test_what_is_measured_gives_equal_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of zeros, so that all answers are: both ways take their arguments."""
    monkeypatch.setattr(prefill_way, "_ROWS", 64)
    monkeypatch.setattr(prefill_way, "_PAST", 128)
    shape = Shape(mx.float32, 2, 1, 64, 64, 4, 8)
    with emulated():
        kernel, unsealed = prefill_way._by_kernel(shape)(), prefill_way._by_mlx(shape)()
    assert kernel.shape == unsealed.swapaxes(0, 1).shape == (64, 2, 64)
    assert mx.array_equal(kernel, unsealed.swapaxes(0, 1))
