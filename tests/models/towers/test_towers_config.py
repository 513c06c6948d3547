"""Configs of vision towers: published ones are accepted, and what would change the features is refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from configs.published import published
from support.models.towers import FAMILIES, config_of

from mlxinfer.errors import UnsupportedModelError
from mlxinfer.models.config_reader import with_ignored
from mlxinfer.models.towers import TOWERS, has_tower, tower_of
from mlxinfer.nn.weights import Dense, Matrix, Recipe

PUBLISHED = {name: config for name, config in published().items() if config.get("model_type") in TOWERS and "vision_config" in config}


class Zeros:
    """Implements `Weights` with zeros for any request, never evaluated."""

    def has(self, name: str) -> bool:
        return False

    def matrix(self, name: str, shape: tuple[int, ...], *, otherwise: Sequence[Recipe] = (), quantizable: bool = True) -> Matrix:
        return Dense(mx.zeros(shape))

    def vector(self, name: str, shape: tuple[int, ...], *, otherwise: Sequence[Recipe] = (), dtype: mx.Dtype | None = None) -> mx.array:
        return mx.zeros(shape)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_published_configs_are_accepted(name: str) -> None:
    assert has_tower(PUBLISHED[name])
    tower_of(PUBLISHED[name], Zeros())


HUB = {
    "smolvlm": {
        "hidden_size": 1152,
        "image_size": 384,
        "intermediate_size": 4304,
        "max_image_size": {"longest_edge": 384},
        "patch_size": 14,
    },
    "gemma3": {
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
    },
    "qwen2_vl": {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "in_chans": 3, "hidden_size": 3584, "spatial_patch_size": 14},
    "qwen2_5_vl": {
        "hidden_size": 1280,
        "in_chans": 3,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
    },
    "mistral3": {"head_dim": 64, "hidden_act": "silu", "image_size": 1540, "patch_size": 14, "rope_theta": 10000.0, "num_channels": 3},
}


@pytest.mark.parametrize("model_type", sorted(HUB))
def test_sparse_configs_of_the_hub_are_accepted(model_type: str) -> None:
    tower_of({"model_type": model_type, "text_config": {"hidden_size": 2048}, "vision_config": HUB[model_type]}, Zeros())


@pytest.mark.parametrize("family", FAMILIES)
def test_an_unknown_key_is_refused(family: str) -> None:
    config = config_of(family)
    config["vision_config"]["new_rotation"] = 2
    with pytest.raises(UnsupportedModelError, match=r"vision_config\.new_rotation = 2 is not understood"):
        tower_of(config, Zeros())
    tower_of(with_ignored(config, ["new_rotation"]), Zeros())


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("smolvlm", "model_type", "clip_vision_model"),
        ("gemma3", "num_channels", 1),
        ("gemma3", "hidden_act", "unheard"),
        ("mistral3", "rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4}),
        ("qwen3_vl", "deepstack_visual_indexes", [9]),
        ("qwen3_vl", "temporal_patch_size", 4),
        ("qwen2_5_vl", "window_size", 4),
        ("gemma4", "attention_bias", True),
        ("internvl", "norm_type", "batch_norm"),
        ("internvl", "use_mask_token", True),
        ("internvl", "image_size", [28, 56]),
    ],
)
def test_another_maths_is_refused(family: str, key: str, value: Any) -> None:
    config = config_of(family)
    config["vision_config"][key] = value
    with pytest.raises(UnsupportedModelError, match="unheard" if key == "hidden_act" else key if key != "rope_parameters" else "rope_type"):
        tower_of(config, Zeros())


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("mistral3", "vision_feature_layer", -2),
        ("internvl", "ps_version", "v1"),
        ("internvl", "downsample_ratio", 0.25),
        ("gemma3", "mm_tokens_per_image", 25),
    ],
)
def test_settings_beside_the_vision_config_are_checked(family: str, key: str, value: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=key):
        tower_of(config_of(family) | {key: value}, Zeros())


def test_models_without_a_tower_are_refused() -> None:
    assert not has_tower({"model_type": "llama"})
    assert not has_tower({"model_type": "gemma3", "text_config": {}})
    with pytest.raises(UnsupportedModelError, match="'mllama' are not supported"):
        tower_of({"model_type": "mllama", "vision_config": {}}, Zeros())
    with pytest.raises(UnsupportedModelError, match="vision_config is missing"):
        tower_of({"model_type": "gemma3"}, Zeros())
