"""Conversions with a merged adapter: the result answers as the adapter over its base."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from support.formats.tiny_gguf import HEADS, KV_HEADS, write_tiny_gguf
from support.models.adapters import random_changes, shapes_of, write_gguf_adapter, write_mlx_lm, write_peft
from support.models.tiny_directory import tiny_directory

from mlxinfer import LLM
from mlxinfer.convert import convert
from mlxinfer.errors import AdapterError, ConversionError
from mlxinfer.loading.gguf import GGUFCheckpoint

IDS = list(range(3, 60))


@pytest.fixture(autouse=True)
def _exact_products(monkeypatch):
    """Keep the CPU's packed products from rounding activations to 16 bits, with and without adapters."""
    monkeypatch.setenv("MLXINFER_CPU_PRECISION", "float32")


def logits(model: Path, adapter: Path | None = None) -> np.ndarray:
    with LLM(model, dtype="float32", memory_gb=2, adapters=None if adapter is None else {"it": adapter}) as llm:
        return np.array(llm.logits(IDS, adapter=None if adapter is None else "it"))


def shapes_of_gguf(path: Path) -> dict[str, tuple[int, ...]]:
    with closing(GGUFCheckpoint(path)) as checkpoint:
        return {name: checkpoint.shape(name) for name in checkpoint.names()}


@pytest.mark.parametrize(
    ("architecture", "write", "dora"), [("llama", write_peft, True), ("llama", write_mlx_lm, False), ("phi3", write_peft, False)]
)
def test_plain(tmp_path, architecture, write, dora):
    base = tiny_directory(tmp_path / "base", architecture)
    adapter = write(tmp_path / "adapter", random_changes(shapes_of(base), projections=["_proj"], dora=dora))
    report = convert(base, tmp_path / "merged", adapter=adapter)
    assert report.notes[0] == f"merged with the adapter {adapter}"
    assert report.settings["adapter"]
    expected = logits(base, adapter)
    assert np.abs(logits(tmp_path / "merged") - expected).max() < 1e-4
    assert np.abs(logits(base) - expected).max() > 0.1


@pytest.mark.long
def test_quantized_afterwards(tmp_path):
    """The result is that of converting the merged model."""
    base = write_tiny_gguf(tmp_path / "base.gguf")
    changes = random_changes(shapes_of_gguf(base), size=0.02)
    adapter = write_gguf_adapter(tmp_path / "a.gguf", changes, heads=HEADS, kv_heads=KV_HEADS)
    convert(base, tmp_path / "merged", adapter=adapter, dtype="float32")
    assert np.abs(logits(tmp_path / "merged") - logits(base, write_peft(tmp_path / "peft", changes))).max() < 1e-4
    report = convert(base, tmp_path / "at once", adapter=adapter, dtype="float32", bits=4, group_size=32, measure=True)
    convert(tmp_path / "merged", tmp_path / "in two steps", dtype="float32", bits=4, group_size=32)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "at once" / name).read_bytes() == (tmp_path / "in two steps" / name).read_bytes()
    assert report.quality is not None
    assert report.source == base
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


@pytest.mark.long
def test_over_a_quantized_directory(tmp_path):
    base = write_tiny_gguf(tmp_path / "base.gguf")
    convert(base, tmp_path / "four", bits=4, group_size=32, encoder="minmax")
    changes = random_changes(shapes_of_gguf(base), size=0.02, projections=["q_proj", "down_proj"])
    adapter = write_peft(tmp_path / "adapter", changes)
    convert(tmp_path / "four", tmp_path / "merged", adapter=adapter, dtype="float32")
    assert np.abs(logits(tmp_path / "merged") - logits(tmp_path / "four", adapter)).max() < 1e-4
    config = json.loads((tmp_path / "merged" / "config.json").read_text())["quantization"]
    assert config["bits"] == 4
    assert shapes_of(tmp_path / "merged")["model.layers.0.self_attn.q_proj.weight"] == (64, 64)


def test_what_does_not_fit(tmp_path):
    base = tiny_directory(tmp_path / "base")
    changes = random_changes(shapes_of(base))
    other = {name.replace("layers.1", "layers.9"): change for name, change in changes.items()}
    with pytest.raises(AdapterError, match=r"layers\.9.*matrix that the model does not have"):
        convert(base, tmp_path / "out", adapter=write_peft(tmp_path / "a", other))
    turned = {name: type(c)(c.a[:, :-1], c.b, 1.0) for name, c in changes.items()}
    with pytest.raises(AdapterError, match="the adapter is for another model"):
        convert(base, tmp_path / "out", adapter=write_peft(tmp_path / "b", turned))
    with pytest.raises(ConversionError, match="a group size without bits"):
        convert(base, tmp_path / "out", adapter=tmp_path / "a", group_size=32)
    assert not (tmp_path / "out").exists()
