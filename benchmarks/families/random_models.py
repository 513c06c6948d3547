"""GGUF models with random weights, of families whose decode step is not that of llama."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

from ..types.random_model import add_matrix, add_vocabulary

VOCABULARY = 32768
_HEAD, _QUERIES, _KEYS = 64, 16, 8
"""Attention of the model with experts."""
_LAYERS, _HIDDEN = 24, 1024
_EXPERTS, _CHOSEN, _INNER = 32, 8, 512
_WIDE_HEAD, _FEW_QUERIES, _FEW_KEYS, _PERIOD = 256, 8, 2, 4
"""Attention of the hybrid, and how often a layer has it."""
_STATES, _STATE, _TAPS, _FEED = 16, 128, 4, 3584
"""Heads of the hybrid's recurrence, their width, the convolution's, and the feed-forward layers'."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Model:
    """A model and how to write it."""

    about: str
    """What it is like, for the table."""
    architecture: str
    """llama.cpp's name."""
    hparams: Mapping[str, object]
    """Metadata, without the architecture's name before each."""
    tensors: Callable[[], Iterator[tuple[str, Shape]]]
    """Names and shapes of all tensors: matrices are quantized where they have more than a few rows, vectors are ones."""


def _common(inner: int, heads: int, kv: int, dim: int) -> dict[str, object]:
    return {
        "block_count": _LAYERS,
        "context_length": 4096,
        "embedding_length": _HIDDEN,
        "feed_forward_length": inner,
        "attention.head_count": heads,
        "attention.head_count_kv": kv,
        "attention.key_length": dim,
        "attention.value_length": dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1000000.0,
    }


def _whole() -> Iterator[tuple[str, Shape]]:
    yield "token_embd.weight", (VOCABULARY, _HIDDEN)
    yield "output_norm.weight", (_HIDDEN,)


def _attention(heads: int, kv: int, dim: int, queries: int) -> Iterator[tuple[str, Shape]]:
    yield "attn_q.weight", (queries, _HIDDEN)
    yield "attn_k.weight", (kv * dim, _HIDDEN)
    yield "attn_v.weight", (kv * dim, _HIDDEN)
    yield "attn_output.weight", (_HIDDEN, heads * dim)
    yield "attn_q_norm.weight", (dim,)
    yield "attn_k_norm.weight", (dim,)


def _experts() -> Iterator[tuple[str, Shape]]:
    yield from _whole()
    for layer in range(_LAYERS):
        parts = [
            *_attention(_QUERIES, _KEYS, _HEAD, _QUERIES * _HEAD),
            ("attn_norm.weight", (_HIDDEN,)),
            ("ffn_norm.weight", (_HIDDEN,)),
            ("ffn_gate_inp.weight", (_EXPERTS, _HIDDEN)),
            ("ffn_gate_exps.weight", (_EXPERTS, _INNER, _HIDDEN)),
            ("ffn_up_exps.weight", (_EXPERTS, _INNER, _HIDDEN)),
            ("ffn_down_exps.weight", (_EXPERTS, _HIDDEN, _INNER)),
        ]
        for name, shape in parts:
            yield f"blk.{layer}.{name}", shape


def _hybrid() -> Iterator[tuple[str, Shape]]:
    yield from _whole()
    width = _STATES * _STATE
    recurrent: list[tuple[str, Shape]] = [
        ("attn_qkv.weight", (3 * width, _HIDDEN)),
        ("attn_gate.weight", (width, _HIDDEN)),
        ("ssm_conv1d.weight", (3 * width, _TAPS)),
        ("ssm_dt.bias", (_STATES,)),
        ("ssm_a", (_STATES,)),
        ("ssm_alpha.weight", (_STATES, _HIDDEN)),
        ("ssm_beta.weight", (_STATES, _HIDDEN)),
        ("ssm_norm.weight", (_STATE,)),
        ("ssm_out.weight", (_HIDDEN, width)),
    ]
    attention = list(_attention(_FEW_QUERIES, _FEW_KEYS, _WIDE_HEAD, 2 * _FEW_QUERIES * _WIDE_HEAD))
    both: list[tuple[str, Shape]] = [
        ("attn_norm.weight", (_HIDDEN,)),
        ("post_attention_norm.weight", (_HIDDEN,)),
        ("ffn_gate.weight", (_FEED, _HIDDEN)),
        ("ffn_up.weight", (_FEED, _HIDDEN)),
        ("ffn_down.weight", (_HIDDEN, _FEED)),
    ]
    for layer in range(_LAYERS):
        for name, shape in (attention if (layer + 1) % _PERIOD == 0 else recurrent) + both:
            yield f"blk.{layer}.{name}", shape


def models() -> Mapping[str, Model]:
    """By name."""
    experts = {"expert_count": _EXPERTS, "expert_used_count": _CHOSEN, "expert_feed_forward_length": _INNER}
    recurrence = {
        "ssm.conv_kernel": _TAPS,
        "ssm.state_size": _STATE,
        "ssm.group_count": _STATES,
        "ssm.time_step_rank": _STATES,
        "ssm.inner_size": _STATES * _STATE,
        "full_attention_interval": _PERIOD,
        "rope.dimension_count": _WIDE_HEAD // 4,
        "rope.dimension_sections": [11, 11, 10, 0],
    }
    return {
        "experts": Model(
            "qwen3moe with the widths of Granite 1B-A400M: 8 of 32 experts",
            "qwen3moe",
            _common(_INNER, _QUERIES, _KEYS, _HEAD) | experts,
            _experts,
        ),
        "hybrid": Model(
            "qwen35 with the widths of Qwen3.5 0.8B: 18 gated delta nets, 6 attentions",
            "qwen35",
            _common(_FEED, _FEW_QUERIES, _FEW_KEYS, _WIDE_HEAD) | recurrence,
            _hybrid,
        ),
    }


def write(path: Path, model: Model, kind: str) -> Path:
    """Write a model whose matrices are of this type of block."""
    writer = gguf.GGUFWriter(path, model.architecture)
    for key, value in model.hparams.items():
        _add(writer, f"{model.architecture}.{key}", value)
    add_vocabulary(writer, VOCABULARY)
    rng = np.random.default_rng(1)
    for name, shape in model.tensors():
        if name.endswith(".weight") and len(shape) > 1 and shape[-1] > _TAPS and shape[-2] > _EXPERTS:
            add_matrix(writer, name, kind, shape)
        else:
            writer.add_tensor(name, _vector(name, shape, rng))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _vector(name: str, shape: Shape, rng: np.random.Generator) -> np.ndarray:
    """Ones for norms; small matrices and decays are random: which experts are chosen must change from token to token."""
    if name.endswith("ssm_a"):
        return -rng.uniform(0.5, 2.0, shape).astype(np.float32)
    if len(shape) > 1:
        return (rng.standard_normal(shape) * 0.1).astype(np.float32)
    return np.ones(shape, np.float32)


def _add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        assert isinstance(value, int)
        writer.add_uint32(key, value)
