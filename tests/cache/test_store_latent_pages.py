"""Pages of latent attention hold a latent vector once, where no CPU kernel reads keys and values apart."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import tests.families.test_cached_pages as columns
from mlxinfer import kernels_cpu
from mlxinfer.cache.attention.select import attention_backend
from mlxinfer.cache.base import PAGE, AttentionSpec
from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.cache.store import LayerStore
from mlxinfer.models import architecture

GOLDEN = Path(__file__).parents[1] / "golden" / "arch"

NAMES = ["glm4_moe_lite", "deepseek_v3", "kimi_linear"]
LATENT = AttentionSpec(1, 576, 512, query_heads=20, values_in_keys=True)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_cpu, "in_use", lambda: False)


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize(("kv", "once", "twice"), [("16", 1152, 2176), ("8", 612, 1156), ("4", 324, 612)])
def test_bytes_of_a_token(kv: str, once: int, twice: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer of GLM-4.7-Flash or DeepSeek V3."""
    form = KVFormat.parse(kv)
    assert LayerStore.page_bytes(LATENT, mx.bfloat16, form) / PAGE == once
    monkeypatch.setattr(kernels_cpu, "in_use", lambda: True)
    assert LayerStore.page_bytes(LATENT, mx.bfloat16, form) / PAGE == twice


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe_lite", "kimi_linear", "minicpm3", "mistral4"])
def test_families_with_latents_say_that_keys_hold_the_values(name: str) -> None:
    specs = architecture(json.loads((GOLDEN / name / "config.json").read_text())).specs
    attention = [spec for spec in specs if isinstance(spec, AttentionSpec)]
    assert attention
    assert all(spec.values_in_keys for spec in attention)


@pytest.mark.usefixtures("plain")
def test_what_is_allocated_is_what_a_page_is_said_to_take() -> None:
    store = LayerStore(LATENT, mx.bfloat16, KVFormat(4, 4, first16=True))
    store.grow(pages=3, first=2, slots=1)
    assert store.keys_alone
    assert sum(a.nbytes for a in store.sealed) == 3 * LayerStore.page_bytes(LATENT, mx.bfloat16, KVFormat(4, 4))
    assert [a.shape for a in store.first] == [(1, 2, 576, PAGE)]
    assert [a.shape for a in store.open] == [(1, 1, PAGE, 576)]
    assert "plain MLX" in attention_backend(store).name


@pytest.mark.long
@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "column",
    [
        columns.test_a_prefix_is_found_again,
        columns.test_a_fork_goes_on_alone,
        columns.test_a_prefix_comes_back_from_disk,
        columns.test_fewer_bits,
        columns.test_the_cache_takes_what_was_planned,
    ],
)
def test_columns_of_the_table(name: str, column: Callable[..., None], tmp_path: Path) -> None:
    """Those about pages, which run with the CPU kernels elsewhere."""
    column(name, tmp_path) if "disk" in column.__name__ else column(name)


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("first16", [False, True])
def test_codes_are_those_of_keys(first16: bool) -> None:
    """Values of a sealed page are a part of what its keys are read as."""
    store = LayerStore(AttentionSpec(1, 40, 32, values_in_keys=True), mx.float32, KVFormat(4, 8, first16=first16))
    store.grow(pages=2, first=2)
    keys = mx.random.normal((1, 2, PAGE, 40), key=mx.random.key(0))
    full = store.filled([keys, store.values_of(keys)], starts=True)
    store.seal([~0, 0] if first16 else [0, 1], full)
    for k, v in store.past([~0, 0] if first16 else [0, 1]):
        np.testing.assert_array_equal(v, k[..., :32])
    found = np.concatenate([k for k, _ in store.past([~0, 0] if first16 else [0, 1])], axis=1)
    assert np.abs(found - keys).max() < 0.5
    assert np.array_equal(found[:, 0], keys[:, 0]) is first16
