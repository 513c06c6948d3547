"""Random models of several GB whose routing is known, as GGUF files.

Every layer adds little to the residual stream, so a layer sees about the embedding of the newest token. The output matrix makes token t + 1
the most likely one after t. A greedy answer therefore walks through the vocabulary, and its embeddings decide which experts are chosen.
The vocabulary has a range of tokens for each `Routing`:

- uniform: embeddings are independent, and so are the experts of two tokens.
- zipf: one channel is the same in all embeddings. The router reads the popularity of an expert from it.
- sticky: an embedding resembles the one before, and shares many experts with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType as Kind

ROUTINGS = ("uniform", "zipf", "sticky")
RANGE = 1024
"""Tokens of each routing; the first 1024 tokens are bytes and fillers."""
VOCABULARY = RANGE * (1 + len(ROUTINGS))
_ADDED = 0.02
"""Size of what a part of a layer adds, compared to an embedding."""
_POPULAR = 0.3
"""Size of the shared channel of the zipf range, compared to the whole embedding."""
_NOISE = 1.28
"""Standard deviation of a router's logits: that of Gumbel noise, with which log-probabilities sample experts without replacement."""
_ZIPF = 1.0
"""Exponent of the popularity of experts."""
_RESEMBLANCE = 0.9
"""Correlation of two neighbouring embeddings of the sticky range."""
_PIECE = 1 << 22
"""Blocks of random codes made at a time."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a published model, with fewer layers."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    experts: int
    chosen: int
    inner: int
    """Rows of an expert's gate."""
    kind: Kind
    """Type of the experts."""
    dense: int = 0
    """Rows of the gate of a dense layer and of a shared expert, which come first; 0 for a model without them."""
    biased: bool = False
    """True if projections and experts have biases, as those of gpt-oss."""
    hparams: tuple[tuple[str, Any], ...] = ()

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert in the file, without its biases."""
        count = self.hidden * self.inner
        return 2 * _nbytes(count, self.kind_of(self.hidden)) + _nbytes(count, self.kind_of(self.inner))

    def kind_of(self, columns: int) -> Kind:
        """Type of a matrix of an expert. Rows that are not whole blocks of `kind` are Q4_0."""
        return Kind.Q4_0 if columns % gguf.GGML_QUANT_SIZES[self.kind][0] else self.kind

    @property
    def sparse_layers(self) -> int:
        return self.layers - (1 if self.dense else 0)

    @property
    def all_experts(self) -> int:
        """Bytes of all experts in the file."""
        return self.sparse_layers * self.experts * self.expert_bytes


SHAPES = {
    "qwen3-moe": Shape("qwen3moe", 16, 2048, 32, 4, 128, 128, 8, 768, Kind.Q4_0),
    "gpt-oss": Shape("gpt-oss", 12, 2880, 64, 8, 64, 32, 4, 2880, Kind.MXFP4, biased=True, hparams=(("attention.sliding_window", 128),)),
    "glm": Shape(
        "glm4moe",
        5,
        4096,
        96,
        8,
        128,
        128,
        8,
        1408,
        Kind.Q4_K,
        dense=10944,
        hparams=(
            ("rope.dimension_count", 64),
            ("expert_shared_count", 1),
            ("leading_dense_block_count", 1),
            ("expert_gating_func", 2),
            ("expert_weights_scale", 1.0),
            ("expert_weights_norm", True),
            ("expert_group_count", 1),
            ("expert_group_used_count", 1),
        ),
    ),
}
"""By name: sizes of Qwen3-30B-A3B, gpt-oss-20b and GLM-4.5-Air."""


def first_token(routing: str) -> int:
    """The first token of a routing's range. The others follow, and an answer returns to the first after the last."""
    return RANGE * (1 + ROUTINGS.index(routing))


def make_model(name: str, folder: Path, shape: Shape | None = None) -> Path:
    """Write a model, unless the folder has it. Returns its path. The file has its name when it is complete."""
    path = folder / f"{name}.gguf"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".part")
        _Writer(shape or SHAPES[name], unfinished).write()
        unfinished.rename(path)
    return path


def _nbytes(count: int, kind: Kind) -> int:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    return count // block * size


class _Writer:
    def __init__(self, shape: Shape, path: Path) -> None:
        self._shape, self._path = shape, path
        self._random = np.random.default_rng(len(shape.architecture))

    def write(self) -> None:
        shape = self._shape
        out = gguf.GGUFWriter(self._path, shape.architecture)
        for key, value in self._hparams():
            _add(out, f"{shape.architecture}.{key}", value)
        self._add_tokenizer(out)
        tensors = list(self._tensors())
        for name, kind, dims, _ in tensors:
            plain = kind in (Kind.F32, Kind.F16)
            size = 4 if kind == Kind.F32 else 2
            rows = dims if plain else (*dims[:-1], _nbytes(dims[-1], kind))
            dtype = np.dtype({Kind.F32: np.float32, Kind.F16: np.float16}.get(kind, np.uint8))
            nbytes = math.prod(dims) * size if plain else math.prod(rows)
            out.add_tensor_info(name, rows, dtype, nbytes, raw_dtype=kind)
        out.write_header_to_file()
        out.write_kv_data_to_file()
        out.write_ti_data_to_file()
        for _, kind, dims, scale in tensors:
            out.write_tensor_data(self._data(kind, dims, scale))
        out.close()

    def _hparams(self) -> Iterator[tuple[str, Any]]:
        shape = self._shape
        yield from (("block_count", shape.layers), ("context_length", 8192), ("embedding_length", shape.hidden))
        yield "feed_forward_length", shape.dense or shape.inner
        yield from (("attention.head_count", shape.heads), ("attention.head_count_kv", shape.kv_heads))
        yield from (("attention.key_length", shape.head), ("attention.value_length", shape.head))
        yield from (("attention.layer_norm_rms_epsilon", 1e-6), ("rope.freq_base", 1e6))
        yield from (("expert_count", shape.experts), ("expert_used_count", shape.chosen), ("expert_feed_forward_length", shape.inner))
        yield from shape.hparams

    def _add_tokenizer(self, out: gguf.GGUFWriter) -> None:
        tokens = [chr(33 + i) for i in range(94)]
        tokens += ["ab", *(f"w{i}" for i in range(len(tokens) + 1, VOCABULARY))]
        out.add_tokenizer_model("gpt2")
        out.add_tokenizer_pre("default")
        out.add_token_list(tokens)
        out.add_token_types([1] * VOCABULARY)
        out.add_token_merges(["a b"])
        out.add_eos_token_id(96)
        out.add_file_type(2)

    def _tensors(self) -> Iterator[tuple[str, Kind, tuple[int, ...], Any]]:
        """Yield name, type, shape, and the standard deviation of the numbers or the numbers themselves."""
        shape, hidden = self._shape, self._shape.hidden
        table = self._embeddings()
        yield "token_embd.weight", Kind.F16, table.shape, table
        yield "output.weight", Kind.F16, table.shape, _after(table)
        yield "output_norm.weight", Kind.F32, (hidden,), np.ones(hidden)
        for layer in range(shape.layers):
            for name, kind, dims, scale in self._layer(sparse=layer > 0 or not shape.dense):
                yield f"blk.{layer}.{name}", kind, dims, scale

    def _layer(self, *, sparse: bool) -> Iterator[tuple[str, Kind, tuple[int, ...], Any]]:
        shape, hidden = self._shape, self._shape.hidden
        queries, keys = shape.heads * shape.head, shape.kv_heads * shape.head
        yield "attn_norm.weight", Kind.F32, (hidden,), np.ones(hidden)
        yield f"{'ffn' if shape.architecture == 'qwen3moe' else 'post_attention'}_norm.weight", Kind.F32, (hidden,), np.ones(hidden)
        for part, rows in (("q", queries), ("k", keys), ("v", keys)):
            yield f"attn_{part}.weight", Kind.Q8_0, (rows, hidden), hidden**-0.5
        yield "attn_output.weight", Kind.Q8_0, (hidden, queries), _ADDED * queries**-0.5
        if shape.biased:
            for part, rows in (("q", queries), ("k", keys), ("v", keys), ("output", hidden)):
                yield f"attn_{part}.bias", Kind.F32, (rows,), np.zeros(rows)
            yield "attn_sinks.weight", Kind.F32, (shape.heads,), np.zeros(shape.heads)
        else:
            yield from ((f"attn_{part}_norm.weight", Kind.F32, (shape.head,), np.ones(shape.head)) for part in "qk")
        if sparse:
            yield from self._experts()
        else:
            yield from _feed_forward("", hidden, shape.dense)

    def _experts(self) -> Iterator[tuple[str, Kind, tuple[int, ...], Any]]:
        shape, hidden, count = self._shape, self._shape.hidden, self._shape.experts
        yield "ffn_gate_inp.weight", Kind.F32, (count, hidden), self._router()
        sizes = {"gate": (shape.inner, hidden), "up": (shape.inner, hidden), "down": (hidden, shape.inner)}
        for part, (rows, columns) in sizes.items():
            scale = (_ADDED if part == "down" else 1.0) * columns**-0.5
            yield f"ffn_{part}_exps.weight", shape.kind_of(columns), (count, rows, columns), scale
            if shape.biased:
                yield f"ffn_{part}_exps.bias", Kind.F32, (count, rows), np.zeros((count, rows))
        if shape.biased:
            yield "ffn_gate_inp.bias", Kind.F32, (count,), np.zeros(count)
        if shape.dense:
            yield "exp_probs_b.bias", Kind.F32, (count,), np.zeros(count)
            yield from _feed_forward("_shexp", hidden, shape.inner)

    def _embeddings(self) -> np.ndarray:
        """float32 `[VOCABULARY, hidden]`."""
        hidden = self._shape.hidden
        table = self._random.normal(0, 1, (VOCABULARY, hidden)).astype(np.float32)
        table[:, 0] = 0
        popular, sticky = first_token("zipf"), first_token("sticky")
        table[popular : popular + RANGE, 0] = _POPULAR * hidden**0.5
        for token in range(sticky + 1, sticky + RANGE):
            table[token] = _RESEMBLANCE * table[token - 1] + (1 - _RESEMBLANCE**2) ** 0.5 * table[token]
        return table

    def _router(self) -> np.ndarray:
        """float32 `[experts, hidden]`."""
        count, hidden = self._shape.experts, self._shape.hidden
        router = self._random.normal(0, _NOISE * hidden**-0.5, (count, hidden)).astype(np.float32)
        ranks = 1 + self._random.permutation(count)
        # A norm divides the shared channel by the size of the whole embedding.
        seen = _POPULAR * hidden**0.5 / (1 + _POPULAR**2) ** 0.5
        router[:, 0] = -_ZIPF * np.log(ranks) / seen
        return router

    def _data(self, kind: Kind, dims: tuple[int, ...], scale: Any) -> np.ndarray:
        if isinstance(scale, np.ndarray):
            return scale.astype(np.float16 if kind == Kind.F16 else np.float32)
        block, size = gguf.GGML_QUANT_SIZES[kind]
        count = math.prod(dims) // block
        codes = np.empty((count, size), np.uint8)
        for start in range(0, count, _PIECE):
            part = codes[start : start + _PIECE]
            part[:] = np.frombuffer(self._random.bytes(part.size), np.uint8).reshape(part.shape)
        head = _scales(kind, scale)
        codes[:, : len(head)] = head
        return codes.reshape(*dims[:-1], _nbytes(dims[-1], kind))


def _scales(kind: Kind, scale: float) -> np.ndarray:
    """First bytes of a block with random codes whose numbers have this standard deviation."""
    if kind == Kind.MXFP4:  # a power of two, and numbers up to 6
        return np.array([127 + round(math.log2(scale / 2.93))], np.uint8)
    if kind == Kind.Q4_K:  # a scale and a minimum, each times 6 random bits
        factor = scale / 258
        return np.array([factor, 7.5 * factor], np.float16).view(np.uint8)
    return np.array([scale / (4.63 if kind == Kind.Q4_0 else 73.9)], np.float16).view(np.uint8)


def _feed_forward(suffix: str, hidden: int, inner: int) -> Iterator[tuple[str, Kind, tuple[int, ...], Any]]:
    for part, dims in {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}.items():
        yield f"ffn_{part}{suffix}.weight", Kind.Q8_0, dims, (_ADDED if part == "down" else 1.0) * dims[1] ** -0.5


def _after(table: np.ndarray) -> np.ndarray:
    """Rows of the output matrix: token t + 1 has the embedding of t, and the first of a range that of the last."""
    rows = np.empty_like(table)
    for start in range(0, VOCABULARY, RANGE):
        rows[start : start + RANGE] = np.roll(table[start : start + RANGE], 1, axis=0)
    return rows


def _add(out: gguf.GGUFWriter, key: str, value: Any) -> None:
    add = out.add_bool if isinstance(value, bool) else out.add_uint32 if isinstance(value, int) else out.add_float32
    add(key, value)
