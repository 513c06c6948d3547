"""Against the programs whose formats these are: adapters and logits that PEFT has written, and mlx-lm's `load_adapters`."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.models.adapters import random_changes, shapes_of, write_mlx_lm
from support.models.tiny_directory import tiny_directory
from support.processes.optional import Later

from mlxinfer import LLM
from mlxinfer.adapters.places import places
from mlxinfer.loading.load import meta_model

GOLDEN = Path(__file__).parents[1] / "golden" / "adapters"
IDS = list(range(3, 60))


def logits(base: Path, adapter: Path) -> np.ndarray:
    with LLM(base, dtype="float32", memory_gb=2, adapters={"it": adapter}) as llm:
        return np.array(llm.logits(IDS, adapter="it"))


@pytest.mark.parametrize("name", ["dora", "patterns"])
def test_peft(tmp_path, name):
    expected = np.load(GOLDEN / name / "logits.npy")
    base = tiny_directory(tmp_path / "base")
    assert np.abs(logits(base, GOLDEN / name)[-1] - expected).max() < 1e-4
    with LLM(base, dtype="float32", memory_gb=2) as llm:
        assert np.abs(np.array(llm.logits(IDS))[-1] - expected).max() > 0.5


@pytest.mark.long
@pytest.mark.parametrize(("architecture", "dora"), [("llama", False), ("llama", True), ("qwen3", True)])
def test_mlx_lm(tmp_path, architecture, dora):
    base = tiny_directory(tmp_path / "base", architecture)
    adapter = write_mlx_lm(tmp_path / "adapter", random_changes(shapes_of(base), dora=dora))
    model = Later("mlx_lm.tuner.utils").load_adapters(Later("mlx_lm.utils").load_model(base)[0], str(adapter))
    model.eval()
    expected = np.array(model(mx.array([IDS]))[0].astype(mx.float32))
    assert np.abs(logits(base, adapter) - expected).max() < 1e-4


def test_mlx_lms_names_are_those_of_the_places(tmp_path):
    base = tiny_directory(tmp_path / "base")
    known = places(meta_model(base).model)
    adapter = write_mlx_lm(tmp_path / "adapter", random_changes(shapes_of(base)))
    stored = {name.removeprefix("model.").rpartition(".")[0] for name in mx.load(str(adapter / "adapters.safetensors"))}
    assert stored == set(known)
    assert json.loads((adapter / "adapter_config.json").read_text())["lora_parameters"]["keys"]
