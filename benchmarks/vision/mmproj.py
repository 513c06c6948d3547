"""Random towers as mmproj files for llama.cpp, with the names of the `gguf` package and matrices in float16."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np

from .towers import Case, random_tower

_TYPES = {"smolvlm": "idefics3", "qwen3_vl": "qwen3vl_merger", "gemma3": "gemma3"}
_SUFFIXES = (".weight", ".bias")


def write_mmproj(path: Path, case: Case) -> None:
    """Write the tower of `random_tower`."""
    vision, kind = case.vision, _TYPES[case.config["model_type"]]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, case.layers)
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", kind)
    writer.add_bool("clip.use_gelu", True)
    for key, value in _keys(case, kind).items():
        writer.add_uint32(f"clip.vision.{key}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    for key in ("image_mean", "image_std"):
        writer.add_array(f"clip.vision.{key}", [0.5, 0.5, 0.5])
    deep = vision.get("deepstack_visual_indexes")
    if deep:
        writer.add_array("clip.vision.is_deepstack_layers", [layer in deep for layer in range(case.layers)])
    for name, values in _tensors(case):
        stem = name if name.startswith(("v.", "mm.")) else names.get_name(name, _SUFFIXES)
        if stem is None:
            raise ValueError(f"llama.cpp has no tensor for {name}")
        writer.add_tensor(stem, values.astype(np.float16 if values.ndim > 1 and "position" not in stem else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _keys(case: Case, kind: str) -> dict[str, int]:
    vision: Any = case.vision
    found = {
        "projection_dim": case.config["text_config"]["hidden_size"],
        "image_size": vision.get("image_size", case.side),
        "patch_size": vision["patch_size"],
        "embedding_length": vision["hidden_size"],
        "feed_forward_length": vision["intermediate_size"],
        "block_count": case.layers,
        "attention.head_count": vision.get("num_attention_heads") or vision["num_heads"],
    }
    if kind == "qwen3vl_merger":
        return found | {"spatial_merge_size": 2}
    return found | {"projector.scale_factor": case.config.get("scale_factor", 4)}


def _tensors(case: Case) -> Iterator[tuple[str, np.ndarray]]:
    """Yield tensors under llama.cpp's names, or under names that the `gguf` package maps."""
    _, weights = random_tower(case, mx.float16)
    for name, tensor in weights.asked.items():
        values = np.array(tensor.astype(mx.float32))
        name = name.removeprefix("model.") if case.config["model_type"] != "smolvlm" else name
        last = name.rpartition(".")[2]
        if name.startswith("visual.deepstack_merger_list."):
            _, _, number, part, _ = name.split(".")
            yield f"v.deepstack.{case.vision['deepstack_visual_indexes'][int(number)]}.{part.replace('linear_', '')}.{last}", values
        elif name.startswith("visual.merger.linear_"):
            yield f"mm.{0 if 'fc1' in name else 2}.{last}", values
        elif name.startswith("visual.merger.norm"):
            yield f"v.post_ln.{last}", values
        elif name == "visual.patch_embed.proj.weight":
            yield "v.patch_embd.weight", values[:, :, 0]
            yield "v.patch_embd.weight.1", values[:, :, 1]
        elif name == "visual.patch_embed.proj.bias":
            yield "v.patch_embd.bias", values
        else:
            yield name.replace("projection_weight", "projection.weight"), values
