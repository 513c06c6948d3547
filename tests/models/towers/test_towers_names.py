"""Vision towers load from the names and layouts of the hub, of transformers 5 and of mlx-vlm, and from quantized matrices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import mlx.core as mx
import pytest
from support.models.towers import FAMILIES, GOLDEN, cases_of, config_of, distance, largest_error, load_tower, save_tower, tensors_of

from mlxinfer.errors import WeightsError
from mlxinfer.loading.directory import SafetensorsCheckpoint
from mlxinfer.loading.weights import MetaWeights
from mlxinfer.models.towers import tower_of

Tensors = Mapping[str, mx.array]
PREFIXES_MLX_VLM = {
    "smolvlm": {"model.": ""},
    "idefics3": {"model.": ""},
    "gemma3": {},
    "lfm2_vl": {"model.vision_tower.vision_model.": "vision_tower.", "model.multi_modal_projector.": "multi_modal_projector."},
    "mistral3": {"vision_tower.": "vision_tower.vision_model."},
    "qwen3_vl": {"model.visual.": "vision_tower."},
    "qwen3_5": {"model.visual.": "vision_tower."},
    "qwen2_5_vl": {"visual.": "vision_tower."},
    "qwen2_vl": {"visual.": "vision_tower."},
    "gemma4": {"model.": ""},
    "gemma4_e": {"model.": ""},
    "gemma4_unified": {"model.": ""},
}
PREFIXES_TRANSFORMERS_5 = {
    "gemma3": {"vision_tower.vision_model.": "model.vision_tower.", "multi_modal_projector.": "model.multi_modal_projector."},
    "lfm2_vl": {"model.vision_tower.vision_model.": "model.vision_tower."},
    "mistral3": {"vision_tower.": "model.vision_tower.", "multi_modal_projector.": "model.multi_modal_projector."},
    "internvl": {"vision_tower.": "model.vision_tower.", "multi_modal_projector.": "model.multi_modal_projector."},
    "qwen2_5_vl": {"visual.": "model.visual."},
    "gemma4_unified": {"model.vision_embedder.": "model.embed_vision.", "model.embed_vision.": "model.embed_vision.multimodal_embedder."},
}


def renamed(tensors: Tensors, prefixes: Mapping[str, str]) -> dict[str, mx.array]:
    """Replace the first prefix that fits."""
    found = {}
    for name, tensor in tensors.items():
        old = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
        found[prefixes.get(old, "") + name.removeprefix(old)] = tensor
    return found


def channels_last(tensors: Tensors) -> dict[str, mx.array]:
    """Store convolutions as mlx-vlm does."""
    return {name: mx.moveaxis(tensor, 1, -1) if tensor.ndim > 3 else tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("family", sorted(PREFIXES_MLX_VLM))
def test_names_of_mlx_vlm(family: str, tmp_path: Path) -> None:
    tensors = channels_last(renamed(tensors_of(family), PREFIXES_MLX_VLM[family]))
    assert largest_error(load_tower(save_tower(tmp_path, config_of(family), tensors)), family) < 2e-5


@pytest.mark.parametrize("family", sorted(PREFIXES_TRANSFORMERS_5))
def test_names_of_transformers_5(family: str, tmp_path: Path) -> None:
    tensors = renamed(tensors_of(family), PREFIXES_TRANSFORMERS_5[family])
    assert largest_error(load_tower(save_tower(tmp_path, config_of(family), tensors)), family) < 2e-5


ORIGINAL = {
    "vision_tower.": "vision_model.",
    "multi_modal_projector.layer_norm": "mlp1.0",
    "multi_modal_projector.linear_1": "mlp1.1",
    "multi_modal_projector.linear_2": "mlp1.3",
    "cls_token": "class_embedding",
    "position_embeddings": "position_embedding",
    "patch_embeddings.projection": "patch_embedding",
    "encoder.layer.": "encoder.layers.",
    "attention.projection_layer": "attn.proj",
    "attention.": "attn.",
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
    "lambda_": "ls",
}
"""Parts of names of transformers' InternVL, and the original's."""


@pytest.mark.parametrize("layout", [dict, channels_last])
@pytest.mark.parametrize("family", ["internvl", "internvl_6b"])
def test_original_names_of_internvl(family: str, layout: Callable[[Tensors], dict[str, mx.array]], tmp_path: Path) -> None:
    tensors, parts = {}, {}
    for name, tensor in tensors_of(family).items():
        for old, new in ORIGINAL.items():
            name = name.replace(old, new)
        tensors[name] = tensor
    for name in [name for name in tensors if ".attn.q_proj." in name]:
        names = [name.replace("q_proj", part) for part in ("q_proj", "k_proj", "v_proj")]
        parts[name.replace("q_proj", "qkv")] = mx.concatenate([tensors.pop(each) for each in names])
    config = config_of(family)
    vision = config["vision_config"]
    own = {"qkv_bias": vision.pop("attention_bias"), "qk_normalization": vision.pop("use_qk_norm"), "model_type": "intern_vit_6b"}
    config = {"model_type": "internvl_chat", "vision_config": vision | own, "llm_config": config["text_config"], "downsample_ratio": 0.5}
    assert largest_error(load_tower(save_tower(tmp_path, config, layout(tensors | parts))), family) < 2e-5


@pytest.mark.parametrize("family", ["idefics3", "internvl", "lfm2_vl", "qwen2_5_vl", "qwen2_vl"])
def test_quantized_matrices_with_biases(family: str, tmp_path: Path) -> None:
    """A tower of MLX's quantized matrices equals one of the same numbers in float32."""
    quantized, plain = {}, {}
    for name, tensor in tensors_of(family).items():
        quantized[name] = plain[name] = tensor
        if tensor.ndim == 2 and tensor.shape[1] % 32 == 0 and "embed" not in name:
            codes, scales, biases = mx.quantize(tensor, group_size=32, bits=8)
            place = name.removesuffix(".weight")
            quantized |= {name: codes, f"{place}.scales": scales, f"{place}.biases": biases}
            plain[name] = mx.dequantize(codes, scales, biases, group_size=32, bits=8)
    assert len(quantized) > len(plain) + 4
    folders = [tmp_path / "quantized", tmp_path / "plain"]
    for folder in folders:
        folder.mkdir()
    packed = load_tower(save_tower(folders[0], config_of(family) | {"quantization": {"group_size": 32, "bits": 8}}, quantized))
    unpacked = load_tower(save_tower(folders[1], config_of(family), plain))
    pixels, sizes, _ = next(cases_of(family))
    assert distance(packed.features(pixels, sizes).features, unpacked.features(pixels, sizes).features) < 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_missing_and_misshaped_tensors_are_named(family: str, tmp_path: Path) -> None:
    tensors = tensors_of(family)
    norms = sorted(name for name in tensors if "norm" in name)
    missing, misshaped = norms[0], norms[-1]
    tensors = {name: tensor[:-1] if name == misshaped else tensor for name, tensor in tensors.items() if name != missing}
    with pytest.raises(WeightsError) as caught:
        load_tower(save_tower(tmp_path, config_of(family), tensors))
    assert f"{missing} is missing" in str(caught.value)
    assert f"{misshaped} has shape" in str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_is_used(family: str) -> None:
    checkpoint = SafetensorsCheckpoint(GOLDEN / family)
    weights = MetaWeights(checkpoint)
    tower_of(checkpoint.config, weights)
    weights.finish()
    used = {source for request in weights.index.requests.values() for source in request.sources}
    assert used == set(checkpoint.names())
