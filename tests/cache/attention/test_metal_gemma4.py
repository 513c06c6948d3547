"""Gemma 4 by the kernels of a Mac, in the emulator: normed values, keys as values, and layers that read the pages of others."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from support.engines.tiny_engine import GOLDEN
from support.kernels.emulated import counting
from support.models.plain_weights import PlainWeights

from mlxinfer.cache.attention import select, trial
from mlxinfer.cache.attention.metal import METAL
from mlxinfer.cache.attention.select import attention_backend
from mlxinfer.cache.base import AttentionSpec, Segment
from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.cache.paged import PagedCache
from mlxinfer.cache.store import LayerStore
from mlxinfer.kernels_metal import kernel_trial
from mlxinfer.models import build
from mlxinfer.models.decoder import Decoder

pytestmark = pytest.mark.emulator
NAMES = ("gemma4_text", "gemma4_text_experts", "gemma4_text_shared")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Kernels as a Mac uses them, and how often each was launched."""
    found: Counter[str] = Counter()
    monkeypatch.delenv(kernel_trial.SWITCH, raising=False)
    monkeypatch.setattr(select.kernels_cpu, "in_use", lambda: False)
    monkeypatch.setattr(kernel_trial, "is_gpu", lambda: True)
    trial.forget_trials()

    with counting(found):
        yield found
    for each in kernel_trial.TRIALS:
        each.forget()


def logits_of(model: Decoder, tokens: list[int], cuts: list[int]) -> np.ndarray:
    """Logits of a sequence in steps that end at `cuts`, beside another sequence of the same tokens."""
    cache = PagedCache(model.layers, dtype=mx.float32, kv_cache_tokens=1 << 12, chunk=128, backend=lambda store: METAL)
    slots, found, start = [cache.open(), cache.open()], [], 0
    for end in cuts:
        step = cache.begin([Segment(slot, i * (end - start), end - start, start, len(tokens)) for i, slot in enumerate(slots)])
        hidden = model.hidden(mx.array(tokens[start:end] * 2, mx.int32), step)
        logits = model.logits(hidden)
        mx.eval(logits, step.state)
        cache.commit(step)
        one, other = np.array(logits).reshape(2, end - start, -1)
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
        found.append(one)
        start = end
    return np.concatenate(found)


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_the_golden_ones(name: str, launches: Counter[str]) -> None:
    folder = GOLDEN / name
    reference = np.load(folder / "reference.npz")
    model = build(json.loads((folder / "config.json").read_text()), PlainWeights.open(folder / "model.safetensors"))
    assert isinstance(model, Decoder)
    launches.clear()
    cuts = [9, 12, 13, 60, *range(61, 70), 92, 99, 100]
    got = logits_of(model, reference["ids"].tolist(), cuts)
    few = [end - start <= 8 for start, end in pairwise(cuts)]
    assert launches["paged_attention_decode"] == len(model.blocks) * sum(few)
    assert launches["append_rows"] == 0
    np.testing.assert_allclose(got, reference["logits"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kv", "dtype"), [(KVFormat(), mx.bfloat16), (KVFormat(8, 6), mx.float16)], ids=["16", "k8v6"])
def test_layers_whose_pages_others_read_pass_their_trial(kv: KVFormat, dtype: mx.Dtype, launches: Counter[str]) -> None:
    for spec in (AttentionSpec(1, 64, 64, 70, query_heads=4, shared=True), AttentionSpec(2, 80, 80, query_heads=6, shared=True)):
        assert attention_backend(LayerStore(spec, dtype, kv)) is METAL
