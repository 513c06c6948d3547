"""Adapters of shares of every block: what they add, summed over all shares, is what they add to whole blocks."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.engines.shares import parts_of, through
from support.engines.tiny_engine import GOLDEN
from support.models.adapters import random_changes, shapes_of, write_peft

from mlxinfer.adapters.adapted_model import AdaptedModel
from mlxinfer.adapters.files import open_adapter
from mlxinfer.adapters.places import of_share
from mlxinfer.adapters.update import Adapter
from mlxinfer.errors import AdapterError
from mlxinfer.models.decoder import BlockStack

BY_ROWS = [f"self_attn.{name}_proj" for name in "qkv"] + ["mlp.gate_proj", "mlp.up_proj"]


def written(folder: Path, name: str, **options: object) -> Adapter:
    changes = random_changes(shapes_of(GOLDEN / name), 5, size=0.4, **options)  # type: ignore[arg-type]
    return open_adapter("one", write_peft(folder, changes), {})


def adapted(stack: BlockStack, adapter: Adapter) -> BlockStack:
    return AdaptedModel(stack, [adapter], mx.float32).for_slots([(1, 5)])


@pytest.mark.parametrize(("name", "options"), [("llama", {}), ("qwen2", {}), ("llama", {"dora": True, "projections": BY_ROWS})])
def test_they_sum_up_to_the_whole_adapter(name: str, options: dict[str, object], tmp_path: Path) -> None:
    adapter = written(tmp_path, name, **options)
    shares, whole = parts_of(name, 2, dtype="float32")
    rows = np.random.default_rng(1).normal(size=(5, whole.hidden_size)).astype(np.float32)
    exact = through([adapted(whole, adapter)], rows)
    plain = through([whole], rows)
    parts = [adapted(share, of_share([adapter], share.part)[0]) for share in shares]
    np.testing.assert_allclose(through(parts, rows), exact, rtol=2e-4, atol=2e-5 * np.abs(exact).max())
    assert np.abs(plain - exact).max() > 0.1 * np.abs(exact).max()


def test_magnitudes_of_divided_rows_are_refused_in_a_line(tmp_path: Path) -> None:
    adapter = written(tmp_path, "llama", dora=True)
    shares, _ = parts_of("llama", 2)
    with pytest.raises(AdapterError, match=r"magnitudes \(DoRA\) for (o|down)_proj, whose rows --split tensor divides") as found:
        of_share([adapter], shares[0].part)
    assert "\n" not in str(found.value)
