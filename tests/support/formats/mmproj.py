"""Writes mmproj files from the tensors of hub checkpoints, by the rules of llama.cpp's converter and the names of the `gguf` package."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Arrays = Mapping[str, np.ndarray]
Named = Iterator[tuple[str, np.ndarray]]
SUFFIXES = (".weight", ".bias", ".input_max", ".input_min", ".output_max", ".output_min")
TYPES = {
    "idefics3": "idefics3",
    "smolvlm": "idefics3",
    "gemma3": "gemma3",
    "mistral3": "pixtral",
    "qwen2_vl": "qwen2vl_merger",
    "qwen2_5_vl": "qwen2.5vl_merger",
    "qwen3_vl": "qwen3vl_merger",
    "qwen3_5": "qwen3vl_merger",
    "internvl": "internvl",
    "lfm2_vl": "lfm2",
    "gemma4": "gemma4v",
}
"""`model_type` to `clip.projector_type`."""


def write_mmproj(path: Path, config: Mapping[str, Any], tensors: Arrays, *, half: bool = False, **keys: Any) -> Path:
    """Write the tower of a checkpoint. `half`: matrices in float16. `keys` replace keys of `clip.vision`; None leaves one out."""
    vision, kind = config["vision_config"], TYPES[config["model_type"]]
    layers = vision.get("num_hidden_layers") or vision.get("depth")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, max(layers, 4))  # counts the projector's products too
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", kind)
    for key, value in (_keys(config, vision, layers, tensors) | keys).items():
        _add(writer, key if key.startswith("clip.") else f"clip.vision.{key}", value)
    for name, values in _converted(config, vision, tensors):
        stem = name if name.startswith(("v.", "mm.")) else names.get_name(name, SUFFIXES)
        assert stem is not None, name
        wide = half and values.ndim > 1 and "position" not in stem
        writer.add_tensor(stem, np.ascontiguousarray(values, np.float16 if wide else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_array(key, value)


def _keys(config: Mapping[str, Any], vision: Mapping[str, Any], layers: int, tensors: Arrays) -> dict[str, Any]:
    """Keys that `MmprojModel.set_gguf_parameters` and the families' classes write."""
    kind = TYPES[config["model_type"]]
    hidden = vision.get("embed_dim", vision.get("hidden_size"))
    image = vision.get("image_size", 560)
    inner = hidden if "embed_dim" in vision else vision["intermediate_size"]
    found: dict[str, Any] = {
        "projection_dim": (config.get("text_config") or config)["hidden_size"],
        "image_size": image[0] if isinstance(image, list) else image,
        "patch_size": vision["patch_size"][0] if isinstance(vision["patch_size"], list) else vision["patch_size"],
        "embedding_length": hidden,
        "feed_forward_length": inner,
        "block_count": layers,
        "attention.head_count": vision.get("num_attention_heads", vision.get("num_heads")),
        "attention.layer_norm_epsilon": float(vision.get("layer_norm_eps", vision.get("rms_norm_eps", 1e-6))),
    }
    if kind.startswith("qwen"):
        found["spatial_merge_size"] = vision.get("spatial_merge_size", 2)
        found["clip.use_gelu"] = kind == "qwen3vl_merger"
    if kind == "qwen3vl_merger":
        deep = vision.get("deepstack_visual_indexes", [])
        found |= {"is_deepstack_layers": [layer in deep for layer in range(layers)]}
        found |= {"image_mean": list(_CLIP_MEAN), "image_std": list(_CLIP_STD)}
    if kind == "qwen2.5vl_merger":
        found["n_wa_pattern"] = vision["fullatt_block_indexes"][0] + 1
        found["window_size"] = vision["window_size"]
    if kind == "idefics3":
        found["projector.scale_factor"] = config["scale_factor"]
    if kind == "internvl":
        found["projector.scale_factor"] = int(1 / config["downsample_ratio"])
    if kind == "lfm2":
        found["projector.scale_factor"] = config.get("downsample_factor", 2)
    if kind == "gemma3":
        found["projector.scale_factor"] = found["image_size"] // found["patch_size"] // int(config["mm_tokens_per_image"] ** 0.5)
    if kind == "gemma4v" and vision["pooling_kernel_size"] != 3:
        found["projector.scale_factor"] = vision["pooling_kernel_size"]
    if kind == "pixtral":
        found["spatial_merge_size"] = config["spatial_merge_size"]
        found["clip.use_silu"] = vision.get("hidden_act", "gelu") == "silu"
    return found


_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def _converted(config: Mapping[str, Any], vision: Mapping[str, Any], tensors: Arrays) -> Named:
    edit = {"pixtral": _pixtral, "gemma3": _gemma3, "internvl": _internvl, "lfm2": _lfm2, "gemma4v": _gemma4}.get(
        TYPES[config["model_type"]]
    )
    for name, values in tensors.items():
        if "language_model" in name or "text_model" in name or name.startswith("lm_head"):
            continue
        if TYPES[config["model_type"]].startswith("qwen"):
            yield from _qwen(name, values, vision)
        elif edit is not None:
            yield from edit(name, values, vision)
        else:
            yield name, values


def _permuted(values: np.ndarray, heads: int) -> np.ndarray:
    """`LlamaModel.permute`."""
    shape = (heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return values.reshape(shape).swapaxes(1, 2).reshape(values.shape)


def _pixtral(name: str, values: np.ndarray, vision: Mapping[str, Any]) -> Named:
    name = name.removeprefix("model.")
    if name.endswith(("q_proj.weight", "k_proj.weight")):
        values = _permuted(values, vision["num_attention_heads"])
    yield name, values


def _gemma3(name: str, values: np.ndarray, vision: Mapping[str, Any]) -> Named:
    name = name.removeprefix("model.").replace("_weight", ".weight")
    yield name, values + 1 if "soft_emb_norm.weight" in name else values


def _internvl(name: str, values: np.ndarray, vision: Mapping[str, Any]) -> Named:
    for old, new in {"layer_norm": "0", "linear_1": "1", "linear_2": "3"}.items():
        for prefix in ("multi_modal_projector.", "model.multi_modal_projector."):
            name = name.replace(f"{prefix}{old}", f"mlp1.{new}")
    if name.startswith("vision_tower."):
        name = f"model.{name}"
    if (".lambda_" in name or "position_embedding" in name) and not name.endswith(".weight"):
        name += ".weight"
    yield name, values


def _lfm2(name: str, values: np.ndarray, vision: Mapping[str, Any]) -> Named:
    name = name.removeprefix("model.")
    if name.startswith("vision_tower.") and not name.startswith("vision_tower.vision_model."):
        name = name.replace("vision_tower.", "vision_tower.vision_model.", 1)
    if "patch_embedding.weight" in name:
        patch = vision["patch_size"]
        values = values.reshape(len(values), patch, patch, 3).transpose(0, 3, 1, 2)
    yield name, values


def _gemma4(name: str, values: np.ndarray, vision: Mapping[str, Any]) -> Named:
    name = name if name.startswith("model.") else f"model.{name}"
    name = name.replace("model.vision_tower.encoder.", "vision_model.model.").replace(".linear.weight", ".weight")
    if name.endswith("position_embedding_table"):
        name += ".weight"
    if name.endswith("patch_embedder.input_proj.weight"):
        patch = vision["patch_size"]
        values = values.reshape(len(values), patch, patch, 3).transpose(0, 3, 1, 2)
    yield name, np.atleast_1d(values)


def _qwen(name: str, values: np.ndarray, vision: Mapping[str, Any]) -> Named:
    name = name.removeprefix("model.")
    suffix = name.rpartition(".")[2]
    if name.startswith("visual.deepstack_merger_list."):
        _, _, number, part, _ = name.split(".")
        layer = vision["deepstack_visual_indexes"][int(number)]
        yield f"v.deepstack.{layer}.{part.replace('linear_', '')}.{suffix}", values
    elif name.startswith(("visual.merger.linear_fc1", "visual.merger.linear_fc2")):
        yield f"mm.{0 if 'fc1' in name else 2}.{suffix}", values
    elif name.startswith("visual.merger.norm"):
        yield f"v.post_ln.{suffix}", values
    elif name == "visual.patch_embed.proj.weight":
        yield "v.patch_embd.weight", values[:, :, 0]
        yield "v.patch_embd.weight.1", values[:, :, 1]
    elif name == "visual.patch_embed.proj.bias":
        yield "v.patch_embd.bias", values
    elif ".qkv." in name and "embed_dim" in vision:  # the converter of qwen2_vl and qwen2_5_vl divides them
        for part, own in zip("qkv", np.split(values, 3), strict=True):
            yield name.replace("qkv", part), own
    else:
        yield name, values
