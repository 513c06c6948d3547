"""A GGUF model whose matrices have the block types of a K-quant mixture, for tests of how they are held. Its numbers are random."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from tests.support.formats.gguf_file import Tensor, array_tensor, write

WIDTH, HIDDEN, LAYERS, HEADS = 256, 512, 2, 4
TOKENS = [chr(code) for code in range(33, 127)]
_HALVES = {
    "Q2_K": {80: 1, 82: 1.5},
    "Q3_K": {108: 1},
    "Q4_K": {0: 1, 2: 7.5},
    "Q5_K": {0: 1, 2: 15.5},
    "Q6_K": {208: 1},
    "Q4_1": {0: 1, 2: -7.5},
    "Q5_1": {0: 1, 2: -15.5},
}
"""The float16 numbers of a block by their offsets, as multiples of its scale, with a mean of zero. Types not listed begin with one."""

TypeOf = Callable[[str, int], str]
"""The type of a matrix by its name in the layer ("token_embd" for the embedding) and the layer."""


def random_blocks(kind: str, rows: int, columns: int, random: np.random.Generator, size: float = 0.05) -> np.ndarray:
    """uint8 `[rows, bytes of a row]`: random codes, and scales for numbers of about `size` (root of the mean square)."""
    numbers, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    found = random.integers(0, 256, (rows, columns // numbers, nbytes), dtype=np.uint8)
    scales = random.uniform(0.5, 1.5, (rows, columns // numbers, 1))
    for unit in (1e-3, None):
        unit = unit or size * 1e-3 / float(np.sqrt(np.mean(np.square(dequantize(found.reshape(rows, -1), GGMLQuantizationType[kind])))))
        for at, share in _HALVES.get(kind, {0: 1}).items():
            found[..., at : at + 2] = (unit * share * scales).astype("<f2").view(np.uint8)
    return found.reshape(rows, -1)


def q4_k_m(name: str, layer: int) -> str:
    """llama.cpp's mixture: half of the values and of the down projections in Q6_K."""
    better = name in ("attn_v", "ffn_down") and layer % 2 == 1
    return "Q6_K" if better or name == "token_embd" else "Q4_K"


def write_tiny_kquants(path: Path, type_of: TypeOf = q4_k_m, architecture: str = "llama", **metadata: Any) -> Path:
    """Files of one mixture have the same numbers."""
    random = np.random.default_rng(0)

    def matrix(name: str, rows: int, columns: int, layer: int = 0) -> Tensor:
        kind = type_of(name.rpartition(".")[2], layer)
        data = random_blocks(kind, rows, columns, random).tobytes()
        return Tensor(f"{name}.weight", (rows, columns), data, int(GGMLQuantizationType[kind]))

    def norm(name: str) -> Tensor:
        return array_tensor(f"{name}.weight", 1 + random.normal(0, 0.1, WIDTH))

    tensors = [matrix("token_embd", len(TOKENS), WIDTH), norm("output_norm")]
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        tensors += [norm(f"{block}.attn_norm"), norm(f"{block}.ffn_norm")]
        tensors += [matrix(f"{block}.attn_{part}", WIDTH, WIDTH, layer) for part in ("q", "k", "v", "output")]
        tensors += [matrix(f"{block}.ffn_{part}", HIDDEN, WIDTH, layer) for part in ("gate", "up")]
        tensors += [matrix(f"{block}.ffn_down", WIDTH, HIDDEN, layer)]
    known = {
        "general.architecture": architecture,
        f"{architecture}.block_count": LAYERS,
        f"{architecture}.context_length": 256,
        f"{architecture}.embedding_length": WIDTH,
        f"{architecture}.feed_forward_length": HIDDEN,
        f"{architecture}.attention.head_count": HEADS,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{architecture}.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*TOKENS[:-1], "ab"],
        "tokenizer.ggml.token_type": [1] * len(TOKENS),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 1,
    }
    return write(path, known | metadata, tensors)
