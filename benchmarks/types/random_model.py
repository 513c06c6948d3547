"""GGUF models with random weights, one per block type or mixture: the cost of a product does not depend on its numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind

_HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2)}
"""Offsets of the float16 numbers in a block; for types not listed, its beginning."""
_SCALE = 2e-4
"""Scale of all blocks, chosen so that sums stay well within float16's range."""
_LETTERS = 256


@dataclass(frozen=True, slots=True)
class Sizes:
    """A decoder's widths, those of a known model, with fewer layers."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int = 32768

    @property
    def head(self) -> int:
        return self.hidden // self.heads

    def matrices(self) -> Mapping[str, tuple[int, int]]:
        """Rows and columns of the matrices of a block."""
        kv = self.kv_heads * self.head
        return {
            "attn_q": (self.hidden, self.hidden),
            "attn_k": (kv, self.hidden),
            "attn_v": (kv, self.hidden),
            "attn_output": (self.hidden, self.hidden),
            "ffn_gate": (self.inner, self.hidden),
            "ffn_up": (self.inner, self.hidden),
            "ffn_down": (self.hidden, self.inner),
        }


TypeOf = Callable[[str, int], str]
"""The type of a matrix, by its name in a block ("token_embd" for the embedding, which is the head too) and the layer."""


def write(path: Path, sizes: Sizes, type_of: TypeOf) -> Path:
    """Write a model of the llama architecture. Raises ValueError for a type whose block size does not divide a matrix's columns."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(sizes.layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(sizes.hidden)
    writer.add_feed_forward_length(sizes.inner)
    writer.add_head_count(sizes.heads)
    writer.add_head_count_kv(sizes.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(sizes.head)
    writer.add_rope_freq_base(10000.0)
    add_vocabulary(writer, sizes.vocabulary)
    ones = np.ones(sizes.hidden, np.float32)
    add_matrix(writer, "token_embd.weight", type_of("token_embd", 0), (sizes.vocabulary, sizes.hidden))
    writer.add_tensor("output_norm.weight", ones)
    for layer in range(sizes.layers):
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", ones)
        writer.add_tensor(f"blk.{layer}.ffn_norm.weight", ones)
        for name, shape in sizes.matrices().items():
            add_matrix(writer, f"blk.{layer}.{name}.weight", type_of(name, layer), shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random_blocks(kind: str, rows: int, blocks: int, rng: np.random.Generator) -> np.ndarray:
    """uint8 `[rows, bytes of a row]`: random bytes, except for the float16 numbers, which are small."""
    size = GGML_QUANT_SIZES[Kind[kind]][1]
    data = rng.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    for at in _HALVES.get(kind, (0,)):
        data[..., at : at + 2] = np.array([_SCALE], "<f2").view(np.uint8)
    return data.reshape(rows, blocks * size)


def add_matrix(writer: gguf.GGUFWriter, name: str, kind: str, shape: tuple[int, ...]) -> None:
    """Add a random matrix `[..., rows, columns]` of this type of block. Raises ValueError if its size does not divide the columns."""
    columns = shape[-1]
    block = GGML_QUANT_SIZES[Kind[kind]][0]
    if columns % block:
        raise ValueError(f"{name}: {columns} columns are no blocks of {kind}")
    seed = int.from_bytes(name.encode()[-8:], "little")
    data = random_blocks(kind, math.prod(shape[:-1]), columns // block, np.random.default_rng(seed))
    writer.add_tensor(name, data.reshape(*shape[:-1], -1), raw_dtype=Kind[kind])


def add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """Every byte is a token, in GPT-2's alphabet; the remaining tokens never occur in a text."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    words = [*_byte_letters(), "th", *(f"<{number}>" for number in range(_LETTERS + 1, size))]
    writer.add_token_list(words)
    writer.add_token_types([1] * size)
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(size - 1)


def _byte_letters() -> list[str]:
    """Printable bytes stand for themselves, the others for characters after Latin 1."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (number for number in range(_LETTERS) if number not in printable)
    letters = {number: chr(number) for number in printable} | {number: chr(_LETTERS + i) for i, number in enumerate(others)}
    return [letters[number] for number in range(_LETTERS)]
