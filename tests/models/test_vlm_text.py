"""Text models inside checkpoints that also see images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.plain_weights import PlainWeights
from support.tiny import logits_of

from mlxinfer.errors import UnsupportedModelError
from mlxinfer.models import build
from mlxinfer.models.vlm_text import NOTE

GOLDEN = Path(__file__).parents[1] / "golden" / "arch"
MODELS = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "mistral3": "ministral3",
}


def inner(model_type: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((GOLDEN / MODELS[model_type] / "config.json").read_text(encoding="utf-8"))
    return read


def renamed(model_type: str, style: str) -> dict[str, mx.array]:
    def name(old: str) -> str:
        if style == "plain":
            return old
        return f"language_model.{old}" if style == "mlx-lm" else old.replace("model.", "model.language_model.", 1)

    held = mx.load(str(GOLDEN / MODELS[model_type] / "model.safetensors"))
    return {name(old): tensor for old, tensor in held.items()}


@pytest.mark.parametrize("style", ["plain", "mlx-lm", "transformers"])
@pytest.mark.parametrize("model_type", MODELS)
def test_the_text_model_is_found_under_each_name(model_type: str, style: str) -> None:
    data = np.load(GOLDEN / MODELS[model_type] / "reference.npz")
    weights = PlainWeights(renamed(model_type, style))
    config = {"model_type": model_type, "text_config": inner(model_type), "vision_config": {"depth": 2}, "image_token_id": 5}
    model = build(config, weights)
    assert weights.used == set(weights.tensors)
    stacked = {name for name in weights.tensors if ".experts." in name}
    assert set(weights.tensors) - stacked <= set(weights.asked)
    assert model.notes == (NOTE,)
    assert np.abs(logits_of(model, data["ids"].tolist()) - data["logits"]).max() < 2e-3


@pytest.mark.parametrize("model_type", sorted(MODELS.keys() - {"mistral3"}))
def test_a_flat_config_as_mlx_lm_allows(model_type: str) -> None:
    data = np.load(GOLDEN / MODELS[model_type] / "reference.npz")
    model = build(inner(model_type) | {"model_type": model_type}, PlainWeights(renamed(model_type, "plain")))
    assert model.notes == ()
    assert np.abs(logits_of(model, data["ids"].tolist()) - data["logits"]).max() < 2e-3


@pytest.mark.parametrize(
    "changes", [{"text_config": "gemma"}, {"text_config": {"model_type": "llama"}}, {"text_config": {}, "pooling": 4}], ids=str
)
def test_what_is_not_understood_outside_is_named(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"text_config|pooling"):
        build({"model_type": "gemma3", **changes}, PlainWeights({}))
