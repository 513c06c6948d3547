"""Writes the text model of a golden checkpoint with pictures as a GGUF file, by the names of the `gguf` package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np

from tests.support.formats.gguf_file import Tensor, array_tensor, write
from tests.support.formats.mmproj import write_mmproj

CONTROL, NORMAL = 3, 1


def write_qwen3_vl(directory: Path, golden: Path) -> Path:
    """Write `model.gguf` and `mmproj.gguf` of a golden qwen3_vl checkpoint; returns the former."""
    config = json.loads((golden / "config.json").read_text())
    arrays = {name: np.array(values.astype(mx.float32)) for name, values in _load(golden).items()}
    write_mmproj(directory / "mmproj.gguf", config, arrays, **_limits(golden))
    text = config["text_config"]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3VL, text["num_hidden_layers"])
    tensors: list[Tensor] = []
    for name, values in arrays.items():
        if "visual" in name:
            continue
        found = names.get_name(name.replace("model.language_model.", "model."), (".weight", ".bias"))
        assert found is not None, name
        tensors.append(array_tensor(found, values))
    return write(directory / "model.gguf", {"general.architecture": "qwen3vl", **_hyper(text), **_vocabulary(golden)}, tensors)


def _load(golden: Path) -> dict[str, mx.array]:
    found = mx.load(str(golden / "model.safetensors"))
    assert isinstance(found, dict)
    return found


def _limits(golden: Path) -> dict[str, Any]:
    size = json.loads((golden / "preprocessor_config.json").read_text())["size"]
    return {"image_min_pixels": size["shortest_edge"], "image_max_pixels": size["longest_edge"]}


def _hyper(text: dict[str, Any]) -> dict[str, Any]:
    rope = text.get("rope_scaling") or text["rope_parameters"]
    values = {
        "block_count": text["num_hidden_layers"],
        "context_length": text["max_position_embeddings"],
        "embedding_length": text["hidden_size"],
        "feed_forward_length": text["intermediate_size"],
        "attention.head_count": text["num_attention_heads"],
        "attention.head_count_kv": text["num_key_value_heads"],
        "attention.key_length": text["head_dim"],
        "attention.value_length": text["head_dim"],
        "attention.layer_norm_rms_epsilon": text["rms_norm_eps"],
        "rope.freq_base": float(rope.get("rope_theta") or text["rope_theta"]),
        "rope.dimension_sections": [*rope["mrope_section"], 0],
        "n_deepstack_layers": 3,
    }
    return {f"qwen3vl.{key}": value for key, value in values.items()}


def _vocabulary(golden: Path) -> dict[str, Any]:
    tokenizer = json.loads((golden / "tokenizer.json").read_text())
    settings = json.loads((golden / "tokenizer_config.json").read_text())
    added = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    tokens = {index: token for token, index in tokenizer["model"]["vocab"].items()} | added
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in tokenizer["model"]["merges"]]
    texts = [tokens[index] for index in range(len(tokens))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": [CONTROL if index in added else NORMAL for index in range(len(tokens))],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": texts.index(settings["eos_token"]),
        "tokenizer.chat_template": (golden / "chat_template.jinja").read_text(),
    }
