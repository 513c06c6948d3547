"""The layouts in which experts, norms and convolutions are found in the wild give the same model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.models.plain_weights import PlainWeights
from support.models.tiny import logits_of

from mlxinfer.models import build
from mlxinfer.models.experts import MXFP4
from mlxinfer.nn.weights import Dense, Quantized

GOLDEN = Path(__file__).parents[2] / "golden" / "arch"


def config(name: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((GOLDEN / name / "config.json").read_text(encoding="utf-8"))
    return read


def tensors(name: str) -> dict[str, mx.array]:
    return dict(mx.load(str(GOLDEN / name / "model.safetensors")))


def assert_same_logits(name: str, changed: dict[str, Any], settings: dict[str, Any] | None = None) -> None:
    data = np.load(GOLDEN / name / "reference.npz")
    weights = PlainWeights(changed)
    model = build(config(name) | (settings or {}), weights)
    assert weights.used == set(changed)
    assert np.abs(logits_of(model, data["ids"].tolist()) - data["logits"]).max() < 2e-3


def fused(name: str, layers: list[int], source: str, target: str, parts: tuple[str, str, str], count: int) -> dict[str, mx.array]:
    """Experts that are stored one by one, as transformers 5 has them in memory: gate and up in one tensor of all experts."""
    held = tensors(name)
    for layer in layers:
        gate, up, down = (
            mx.stack([held.pop(f"model.layers.{layer}.{source}.{expert}.{part}.weight") for expert in range(count)]) for part in parts
        )
        held[f"model.layers.{layer}.{target}.gate_up_proj"] = mx.concatenate([gate, up], axis=1)
        held[f"model.layers.{layer}.{target}.down_proj"] = down
    return held


def test_experts_of_qwen3_in_one_tensor() -> None:
    parts = ("gate_proj", "up_proj", "down_proj")
    assert_same_logits("qwen3_moe", fused("qwen3_moe", [1, 2], "mlp.experts", "mlp.experts", parts, 6))


def test_experts_of_mixtral_in_one_tensor() -> None:
    held = fused("mixtral", [0, 1, 2], "block_sparse_moe.experts", "mlp.experts", ("w1", "w3", "w2"), 3)
    for layer in range(3):
        held[f"model.layers.{layer}.mlp.gate.weight"] = held.pop(f"model.layers.{layer}.block_sparse_moe.gate.weight")
    assert_same_logits("mixtral", held)


def packed_experts(held: dict[str, mx.array], layers: int) -> tuple[dict[str, mx.array], dict[str, mx.array]]:
    """gpt-oss with its experts as it ships them (MXFP4 blocks and scales), and with the plain values of those."""
    shipped, plain = dict(held), dict(held)
    for layer in range(layers):
        for part in ("gate_up_proj", "down_proj"):
            name = f"model.layers.{layer}.mlp.experts.{part}"
            rows = held[name].swapaxes(1, 2)
            blocks, scales = mx.quantize(rows, group_size=32, bits=4, mode="mxfp4")
            values = Quantized(blocks, scales, None, MXFP4).dequantize(mx.float32)
            del shipped[name]
            shipped[f"{name}_blocks"] = mx.contiguous(blocks).view(mx.uint8).reshape(*rows.shape[:2], rows.shape[2] // 32, 16)
            shipped[f"{name}_scales"] = scales
            plain[name] = values.swapaxes(1, 2)
    return shipped, plain


def gpt_oss_tensors(settings: dict[str, Any]) -> dict[str, mx.array]:
    hidden, inner, experts = settings["hidden_size"], settings["intermediate_size"], settings["num_local_experts"]
    held = {}
    for name, tensor in tensors("gpt_oss").items():
        resized = tuple({48: hidden, 80: inner, 160: 2 * inner, 4: experts}.get(size, size) for size in tensor.shape)
        held[name] = mx.random.normal(resized, key=mx.random.key(len(held))) * 0.12
    return held


def test_gpt_oss_as_it_is_shipped() -> None:
    settings = {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 4}
    shipped, plain = packed_experts(gpt_oss_tensors(settings), 3)
    held = PlainWeights(shipped)
    tokens = list(range(3, 60))
    logits = logits_of(build(config("gpt_oss") | settings, held), tokens)
    assert held.used == set(shipped)
    assert isinstance(held.asked["model.layers.0.mlp.experts.gate_proj.weight"], Quantized)
    expected = logits_of(build(config("gpt_oss") | settings, PlainWeights(plain)), tokens)
    assert np.abs(logits - expected).max() < 2e-3


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text"])
def test_norms_are_recognized_as_converted_by_the_axes_of_the_convolution(name: str) -> None:
    weights = PlainWeights.open(GOLDEN / name / "model.safetensors")
    build(config(name), weights)
    norm = "model.layers.0.input_layernorm.weight"
    converted, stored = weights.asked, weights.tensors
    assert isinstance(converted[norm], Dense)
    assert isinstance(stored[norm], Dense)
    np.testing.assert_allclose(converted[norm].weight, 1 + stored[norm].weight, rtol=1e-6)
    assert converted["model.layers.0.linear_attn.conv1d.weight"].shape == (96, 4, 1)
    assert_same_logits(name, converted)


def test_a_hybrid_without_recurrent_layers_is_read_as_stored() -> None:
    settings = config("qwen3_5_text") | {"layer_types": ["full_attention"] * 3}
    held = {name: tensor for name, tensor in tensors("qwen3_5_text").items() if "linear_attn" not in name}
    attention = {name: tensor for name, tensor in held.items() if "layers.2.self" in name}
    for layer in (0, 1):
        held |= {name.replace("layers.2", f"layers.{layer}"): tensor for name, tensor in attention.items()}
    weights = PlainWeights(held)
    model = build(settings, weights)
    again = build(settings, PlainWeights(weights.asked))
    np.testing.assert_array_equal(logits_of(model, [5, 6, 7]), logits_of(again, [5, 6, 7]))
