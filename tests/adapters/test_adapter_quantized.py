"""Adapters over quantized models: what the numbers that the model stands for, plus the change, make in float32."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.formats.tiny_gguf import write_tiny_gguf
from support.formats.tiny_kquants import write_tiny_kquants
from support.models.adapters import merge, random_changes, shapes_of, weights_of, write_gguf_adapter, write_mlx_lm, write_peft

from mlxinfer import LLM
from mlxinfer.loading.gguf import GGUFCheckpoint
from mlxinfer.nn.weights import numbers

IDS = list(range(3, 60))
CLOSE = 1e-4
SIZE = 0.02
"""A change of about the size of the matrices: with larger ones the last bits of float32 would grow into the fifth digit."""


@pytest.fixture(autouse=True)
def _exact_products(monkeypatch):
    """The CPU's packed products round activations to 16 bits otherwise, with and without adapters."""
    monkeypatch.setenv("MLXINFER_CPU_PRECISION", "float32")


def logits(model: Path, adapter: Path | None = None, **settings: object) -> np.ndarray:
    with LLM(model, dtype="float32", memory_gb=2, adapters=None if adapter is None else {"it": adapter}, **settings) as llm:
        return np.array(llm.logits(IDS, adapter=None if adapter is None else "it"))


def quantized_directories(plain: Path, folder: Path, bits: int, mode: str, group: int) -> tuple[Path, Path]:
    """A model as mlx-lm quantizes it, and the numbers that its codes stand for as a model in float32."""
    stored, rounded = folder / "stored", folder / "rounded"
    for path in (stored, rounded):
        shutil.copytree(plain, path)
    codes, values = {}, {}
    for name, array in weights_of(plain).items():
        if array.ndim != 2:
            codes[name] = values[name] = array
            continue
        parts, stem = mx.quantize(array, group, bits, mode), name.removesuffix("weight")
        codes |= dict(zip((name, f"{stem}scales", f"{stem}biases"), parts, strict=False))
        values[name] = mx.dequantize(*parts, group_size=group, bits=bits, mode=mode).astype(mx.float32)
    mx.save_safetensors(str(stored / "model.safetensors"), codes)
    mx.save_safetensors(str(rounded / "model.safetensors"), values)
    config = json.loads((stored / "config.json").read_text())
    (stored / "config.json").write_text(json.dumps(config | {"quantization": {"group_size": group, "bits": bits, "mode": mode}}))
    return stored, rounded


@pytest.mark.parametrize(
    ("bits", "mode", "group", "write", "dora"),
    [
        (4, "affine", 32, write_peft, False),
        (4, "affine", 64, write_peft, True),
        (8, "affine", 64, write_mlx_lm, False),
        (4, "mxfp4", 32, write_mlx_lm, True),
    ],
)
def test_mlx_formats(plain, tmp_path, bits, mode, group, write, dora):
    changes = random_changes(shapes_of(plain), dora=dora, size=SIZE)
    stored, rounded = quantized_directories(plain, tmp_path, bits, mode, group)
    assert np.abs(logits(stored) - logits(rounded)).max() < CLOSE
    got = logits(stored, write(tmp_path / "adapter", changes))
    assert np.abs(got - logits(merge(rounded, changes))).max() < CLOSE


def directory_of(path: Path, target: Path) -> Path:
    """A GGUF file as a directory of float32."""
    checkpoint = GGUFCheckpoint(path)
    tensors = {name: numbers(checkpoint.read(name)) for name in checkpoint.names()}
    target.mkdir()
    (target / "config.json").write_text(json.dumps(checkpoint.config))
    mx.save_safetensors(str(target / "model.safetensors"), tensors)
    checkpoint.close()
    return target


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    return directory_of(write_tiny_kquants(folder / "model.gguf"), folder / "model")


@pytest.mark.parametrize(
    ("source", "kind", "dora"),
    [
        (write_tiny_gguf, "gguf", False),
        (write_tiny_gguf, "peft", True),
        (write_tiny_kquants, "gguf", False),
        (write_tiny_kquants, "peft", False),
        (write_tiny_kquants, "mlx-lm", True),
    ],
)
def test_blocks_of_gguf(tmp_path, source, kind, dora):
    base = source(tmp_path / "base.gguf")
    reference = directory_of(base, tmp_path / "reference")
    config = json.loads((reference / "config.json").read_text())
    changes, folder = random_changes(shapes_of(reference), dora=dora, size=SIZE), tmp_path / "adapter"
    if kind == "gguf":
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        adapter = write_gguf_adapter(tmp_path / "adapter.gguf", changes, heads=heads, kv_heads=kv_heads)
    else:
        adapter = (write_peft if kind == "peft" else write_mlx_lm)(folder, changes)
    assert np.abs(logits(base) - logits(reference)).max() < CLOSE
    assert np.abs(logits(base, adapter) - logits(merge(reference, changes))).max() < CLOSE
