"""16-bit matrices stay as stored if the CPU kernels multiply float32 rows with them."""

from __future__ import annotations

import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.models.families import GOLDEN
from support.models.tiny import logits_of

from mlxinfer import kernels_cpu
from mlxinfer.kernels_cpu import Packed
from mlxinfer.loading.load import LoadedModel, load, prepare
from mlxinfer.nn.packing import holders

pytestmark = pytest.mark.skipif(not kernels_cpu.in_use(), reason=kernels_cpu.status())

TOKENS = [(7 * i + 3) % 90 for i in range(20)]
NAMES = sorted(folder.name for folder in GOLDEN.iterdir() if (folder / "model.safetensors").exists())


def rounded(target: Path, name: str, dtype: mx.Dtype, stored: mx.Dtype) -> Path:
    """A golden checkpoint whose numbers are rounded to `dtype`, stored as `stored`."""
    target.mkdir()
    shutil.copyfile(GOLDEN / name / "config.json", target / "config.json")
    weights = mx.load(str(GOLDEN / name / "model.safetensors"))
    assert isinstance(weights, dict)
    changed = {k: a.astype(dtype).astype(stored) if mx.issubdtype(a.dtype, mx.floating) else a for k, a in weights.items()}
    mx.save_safetensors(str(target / "model.safetensors"), changed)
    return target


def bits(model: LoadedModel) -> list[int]:
    return [holder.matrix.layout.bits for holder in holders(model.model) if isinstance(holder.matrix, Packed)]


def planned_and_loaded(path: Path) -> tuple[LoadedModel, int]:
    with prepare(path) as prepared:
        return prepared.read(prepared.load_tokenizer()), prepared.weight_bytes


@pytest.mark.parametrize("name", NAMES)
def test_no_logit_changes_and_half_of_the_memory_is_enough(name: str, tmp_path: Path) -> None:
    wide, planned_wide = planned_and_loaded(rounded(tmp_path / "wide", name, mx.bfloat16, mx.float32))
    narrow, planned = planned_and_loaded(rounded(tmp_path / "narrow", name, mx.bfloat16, mx.bfloat16))
    assert np.array_equal(logits_of(wide.model, TOKENS), logits_of(narrow.model, TOKENS))
    assert bits(narrow).count(16) == bits(wide).count(32) > 0
    assert narrow.weight_bytes < wide.weight_bytes * 0.75
    assert planned < planned_wide * 0.75


def test_what_is_asked_for_in_16_bits_is_rounded_to_them(tmp_path: Path) -> None:
    path = rounded(tmp_path / "half", "llama", mx.float16, mx.float16)
    assert set(bits(load(path))) == {16}
    asked = load(path, dtype="bfloat16")
    assert all(holder.matrix.dtype == mx.bfloat16 for holder in holders(asked.model) if isinstance(holder.matrix, Packed))


def test_quantizing_reads_the_numbers_in_float32(tmp_path: Path) -> None:
    narrow = load(rounded(tmp_path / "narrow", "llama", mx.bfloat16, mx.bfloat16), bits=4, group_size=32)
    wide = load(rounded(tmp_path / "wide", "llama", mx.bfloat16, mx.float32), bits=4, group_size=32)
    assert np.array_equal(logits_of(narrow.model, TOKENS), logits_of(wide.model, TOKENS))
