"""Growing pools waits for the GPU only if there is data to copy."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlxinfer.cache.base import AttentionSpec
from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.cache.store import LayerStore


@pytest.mark.parametrize("kv", [KVFormat(), KVFormat(4, 4, first16=True)], ids=lambda kv: kv.name)
def test_nobody_waits_for_a_pool_that_has_nothing_to_copy(kv: KVFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first pages of a prompt, in every layer; later a large pool is copied before the next layer's."""
    evaluated: list[object] = []
    real = mx.eval
    monkeypatch.setattr(mx, "eval", lambda *arrays: evaluated.append(arrays) or real(*arrays))
    store = LayerStore(AttentionSpec(8, 64, 64), mx.bfloat16, kv)
    store.grow(pages=300, first=2)
    assert not evaluated
    assert store.sealed[0].shape[1] == 300
    assert not any(mx.any(a != 0).item() for a in store.sealed)
    store.grow(pages=400, first=2)
    assert len(evaluated) == 1
