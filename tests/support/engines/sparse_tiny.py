"""Tiny models with routed experts, of random weights, in every form that checkpoints have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
from gguf.constants import GGMLQuantizationType

from mlxinfer.models import build
from mlxinfer.nn.weights import Blocks, Format, Quantized, RawBlocks

from ..formats.gguf_file import Tensor
from ..formats.gguf_golden import golden, write_model
from ..models.plain_weights import RandomWeights
from ..models.tiny_directory import tiny_directory
from .tiny_engine import GOLDEN

FAMILIES = ("qwen3_moe", "gpt_oss", "glm4_moe")
FORMS = ("mlx 4 bits", "bfloat16", "gguf", "gguf 8 bits")
_FILES = {"qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss", "glm4_moe": "glm4moe"}
_WIDE: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"intermediate_size": 96, "moe_intermediate_size": 32, "num_local_experts": 8},
    "gpt_oss": {"intermediate_size": 32, "num_local_experts": 8},
    "glm4_moe": {"intermediate_size": 96, "moe_intermediate_size": 64, "n_routed_experts": 9},
}
_TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": [*map(chr, range(33, 127)), "ab", "bc"],
    "tokenizer.ggml.token_type": [1] * 96,
    "tokenizer.ggml.merges": ["a b", "b c"],
}


def sparse_tiny(target: Path, family: str, form: str) -> Path:
    """Write a model of one of `FAMILIES` in one of `FORMS`: a directory or a file under `target`."""
    if form == "bfloat16":  # Hugging Face's layout, experts one by one
        return tiny_directory(target, family, rounded=True)
    if form == "mlx 4 bits":
        return _mlx_directory(target, family)
    target.mkdir(parents=True)
    architecture, hyper, arrays = golden(_FILES[family])
    if form == "gguf":
        return write_model(target / "model.gguf", architecture, hyper, arrays, _TOKENIZER)
    blocks = [_q8_0(name, arrays.pop(name)) for name in list(arrays) if "_exps.weight" in name and arrays[name].shape[-1] % 32 == 0]
    assert blocks
    return write_model(target / "model.gguf", architecture, hyper, arrays, _TOKENIZER, blocks)


def _mlx_directory(target: Path, family: str) -> Path:
    tiny_directory(target, family, eos=False)
    config = json.loads((GOLDEN / family / "config.json").read_text(encoding="utf-8"))
    config |= {"hidden_size": 64, "eos_token_id": None, **_WIDE[family]}
    weights = RandomWeights(lambda name: Format(4, 32))
    build(config, weights)
    tensors: dict[str, mx.array] = {}
    for name, matrix in weights.asked.items():
        assert not isinstance(matrix, (RawBlocks, Blocks))
        tensors[name] = matrix.weight
        if isinstance(matrix, Quantized):
            base = name.removesuffix("weight")
            assert matrix.biases is not None
            tensors |= {f"{base}scales": matrix.scales, f"{base}biases": matrix.biases}
    mx.save_safetensors(str(target / "model.safetensors"), tensors)
    (target / "config.json").write_text(json.dumps(config | {"quantization": {"group_size": 32, "bits": 4}}))
    return target


def _q8_0(name: str, values: np.ndarray) -> Tensor:
    kind = GGMLQuantizationType.Q8_0
    return Tensor(name, values.shape, gguf.quants.quantize(values.astype(np.float32), kind).tobytes(), int(kind))
