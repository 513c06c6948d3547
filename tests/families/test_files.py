"""Conversion and the way back, and GGUF files that llama.cpp's converter wrote."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.engines.step_peak import measured_peak
from support.models.families import GOLDEN, LIMIT, NAMES, column, config, error, reference
from support.models.plain_weights import PlainWeights
from support.models.planned import MB
from support.models.tiny import logits_of
from support.models.tiny_directory import tiny_directory
from support.oracles.plain_step import PlainCache

from mlxinfer.convert import convert
from mlxinfer.loading.directory import SafetensorsCheckpoint
from mlxinfer.loading.gguf import GGUFCheckpoint
from mlxinfer.loading.load import load
from mlxinfer.loading.memory.plan import plan_memory
from mlxinfer.models import build
from mlxinfer.util.device import DeviceMemory

GGUF = Path(__file__).parents[1] / "golden" / "gguf"
ARCHITECTURES = {
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek3",
    "ernie4_5_moe": "ernie4_5-moe",
    "falcon_h1": "falcon-h1",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "glm4_moe": "glm4moe",
    "gpt_oss": "gpt-oss",
    "granitemoehybrid": "granitehybrid",
    "hunyuan_v1_dense": "hunyuan-dense",
    "kimi_linear": "kimi-linear",
    "lfm2_moe": "lfm2moe",
    "minimax_m2": "minimax-m2",
    "ministral3": "mistral3",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_5_text": "qwen35",
    "qwen3_moe": "qwen3moe",
    "qwen3_next": "qwen3next",
}
"""`model_type` to the GGUF file's name, where it is another."""
VARIANTS = {
    "falcon_h1_norms": "falcon-h1_norms",
    "gemma4_text_experts": "gemma4_experts",
    "gemma4_text_shared": "gemma4_shared",
    "nemotron_h_experts": "nemotron_h_moe",
    "granitemoehybrid_dense": "granitehybrid_dense",
}
"""Golden checkpoint to the file with settings like its own."""


@pytest.mark.long
@column("conversion")
def test_conversion_and_reload(name: str, tmp_path: Path) -> None:
    """Nothing is lost but by quantization, and every tensor of the source is accounted for."""
    tokens, expected = reference(name)
    report = convert(GOLDEN / name, tmp_path / "out")
    used = {source for tensor in report.tensors for source in tensor.sources}
    assert used | set(report.skipped) == set(SafetensorsCheckpoint(GOLDEN / name).names())
    assert error(logits_of(load(tmp_path / "out", dtype="float32").model, tokens), expected) < LIMIT
    convert(GOLDEN / name, tmp_path / "eight", bits=8, group_size=32, encoder="minmax")
    lossy = logits_of(load(tmp_path / "eight", dtype="float32").model, tokens)
    assert np.abs(lossy - expected).mean() < 0.1 * expected.std()


@column("GGUF")
def test_gguf(name: str) -> None:
    """The file is of another random checkpoint of the same architecture, with transformers' logits for that one."""
    kind = config(name)["model_type"]
    alike = VARIANTS.get(name, name if (GGUF / f"{name}.gguf").exists() else ARCHITECTURES.get(kind, kind))
    checkpoint = GGUFCheckpoint(GGUF / f"{alike}.gguf")
    model = build(checkpoint.config, PlainWeights({tensor: checkpoint.read(tensor) for tensor in checkpoint.names()}))
    checkpoint.close()
    data = np.load(GGUF / f"{alike}.npz")
    ids = mx.array(data["ids"])
    logits = model.logits(model.hidden(ids, PlainCache(model.layers).step([(0, ids.size)])))
    assert error(np.array(logits), data["logits"]) < LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_no_step_takes_more_than_was_planned(name: str, tmp_path: Path) -> None:
    loaded = load(tiny_directory(tmp_path, name, context=4096))
    plan = plan_memory(loaded, memory=DeviceMemory(2000 * MB, 1000 * MB), max_context=2048)
    assert measured_peak(loaded, plan, prompt=1000, streams=16) <= plan.step
