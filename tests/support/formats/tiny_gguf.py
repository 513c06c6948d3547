"""A GGUF model of two random Q8_0 blocks that can be loaded and run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType as Kind

from tests.support.formats.gguf_file import Tensor, array_tensor, write

WIDTH, HEADS, KV_HEADS, HIDDEN, LAYERS = 64, 2, 1, 96, 2
TOKENS = [chr(code) for code in range(33, 127)]


def write_tiny_gguf(path: Path, seed: int = 0, more: Mapping[str, Any] | None = None) -> Path:
    """Files of different seeds have one size. `more`: further metadata."""
    rng = np.random.default_rng(seed)

    def matrix(name: str, rows: int, columns: int) -> Tensor:
        values = rng.normal(0, 0.2, (rows, columns)).astype(np.float32)
        return Tensor(f"{name}.weight", values.shape, gguf.quants.quantize(values, Kind.Q8_0).tobytes(), int(Kind.Q8_0))

    def norm(name: str) -> Tensor:
        return array_tensor(f"{name}.weight", 1 + rng.normal(0, 0.1, WIDTH))

    head = WIDTH // HEADS
    tensors = [matrix("token_embd", len(TOKENS), WIDTH), norm("output_norm")]
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        tensors += [norm(f"{block}.attn_norm"), norm(f"{block}.ffn_norm"), matrix(f"{block}.attn_q", WIDTH, WIDTH)]
        tensors += [matrix(f"{block}.attn_{part}", KV_HEADS * head, WIDTH) for part in "kv"]
        tensors += [matrix(f"{block}.attn_output", WIDTH, WIDTH), matrix(f"{block}.ffn_down", WIDTH, HIDDEN)]
        tensors += [matrix(f"{block}.ffn_{part}", HIDDEN, WIDTH) for part in ("gate", "up")]
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": LAYERS,
        "llama.context_length": 256,
        "llama.embedding_length": WIDTH,
        "llama.feed_forward_length": HIDDEN,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": head,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [1] * len(TOKENS),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 1,
    }
    metadata["tokenizer.ggml.tokens"] = [*TOKENS[:-1], "ab"]
    return write(path, metadata | dict(more or {}), tensors)
