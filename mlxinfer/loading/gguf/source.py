"""What the configs of all architectures have in common, from a GGUF file's metadata and from which tensors it has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...errors import CheckpointError
from .hyper import Hyper
from .rope import read_rope
from .split import GGUFFiles

Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Source:
    """The hyperparameters of one file under the name of its architecture, and its tensors."""

    hyper: Hyper
    files: GGUFFiles

    def has(self, tensor: str) -> bool:
        return tensor in self.files.tensors


def base_config(source: Source, model_type: str, *, partial_rope: bool = False) -> Config:
    """The keys that every decoder has."""
    hyper = source.hyper
    layers = hyper.integer("block_count") - hyper.integer("nextn_predict_layers", 0, low=0)
    hidden, heads = hyper.integer("embedding_length"), hyper.integer("attention.head_count")
    head_dim = hyper.integer("attention.key_length", hidden // heads)
    context = hyper.integer("context_length")
    if not 1 <= layers <= len(source.files.tensors):
        raise hyper.bad("block_count", f"leaves {layers} layers for {len(source.files.tensors)} tensors")
    if hyper.integer("attention.value_length", head_dim) != head_dim:
        raise hyper.unsupported("attention.value_length", f"differs from key_length, {head_dim}")
    return {
        "model_type": model_type,
        "vocab_size": _vocabulary(source),
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": hyper.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": hyper.positive("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": not source.has("output.weight"),
        **read_rope(hyper, source.files, head_dim, context, partial=partial_rope),
        **_special_tokens(source),
    }


def dense_config(source: Source, model_type: str) -> Config:
    return base_config(source, model_type) | {"intermediate_size": source.hyper.integer("feed_forward_length"), "hidden_act": "silu"}


def windowed_layers(source: Source, layers: int, period: int) -> list[str]:
    """The layers that see a window only: those flagged in the file, or all but the last of every `period`."""
    key = "attention.sliding_window_pattern"
    if isinstance(source.hyper.take(key), int):
        period = source.hyper.integer(key)
        flags = None
    else:
        flags = source.hyper.flags(key, layers)
    if flags is None:
        flags = [(layer + 1) % period != 0 for layer in range(layers)]
    return ["sliding_attention" if windowed else "full_attention" for windowed in flags]


def _vocabulary(source: Source) -> int:
    if not source.has("token_embd.weight"):
        raise CheckpointError(f"{source.files.path}: tensor token_embd.weight is missing; download or convert the model again")
    shape = source.files.tensors["token_embd.weight"].shape
    if len(shape) != 2:
        raise CheckpointError(
            f"{source.files.path}: tensor token_embd.weight has shape {list(shape)}, must be a matrix; convert the model again"
        )
    return shape[0]


def _special_tokens(source: Source) -> Config:
    metadata = source.files.metadata
    tokens = {key: metadata.get(f"tokenizer.ggml.{name}") for key, name in _SPECIAL.items()}
    return {key: token for key, token in tokens.items() if type(token) is int}


_SPECIAL = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
