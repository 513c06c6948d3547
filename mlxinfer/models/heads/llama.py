"""Separately stored MTP head: one Llama layer for any model with the same hidden size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import DraftError
from ...kernels_cpu import can_run_blocks
from ...nn.activations import gated
from ...nn.attention import Attention, load_output, load_qkv
from ...nn.weights import Weights
from ..block import attention_specs, gated_mlp, pre_norm
from ..common import read_sizes
from ..config_reader import ConfigReader
from ..families.llama import LLAMA
from ..rope_config import MRopeLayout, read_rope
from .mtp import QWEN, Head, HeadPlan, Places, load_head, plain_norm

_ROPE = "mtp"


def head_plan(config: Mapping[str, Any], hidden: int, vocab: int) -> HeadPlan:
    """Read a head's config for a model of `hidden` channels and `vocab` tokens. Raises `DraftError` if it does not fit."""
    reader = ConfigReader(config)
    sizes = read_sizes(reader, LLAMA)
    if sizes.hidden != hidden:
        raise DraftError(f"the head reads rows of {sizes.hidden} channels, and the model has {hidden}: it was trained for another model")
    if sizes.vocab != vocab:
        raise DraftError(f"the head was trained for a vocabulary of {sizes.vocab} tokens, and the model has {vocab}")
    if sizes.layers != 1:
        raise reader.bad("num_hidden_layers", sizes.layers, "1: heads have one layer")
    chosen = reader.integers("draft_vocabulary")
    if chosen is not None and (not chosen or chosen != sorted(set(chosen)) or chosen[0] < 0 or chosen[-1] >= vocab):
        raise reader.error("draft_vocabulary", f"must be ascending token ids below {vocab}")
    normed = reader.boolean("reads_normed", True)
    rope = read_rope(reader, sizes.heads.dim, sizes.positions, mrope=MRopeLayout(interleaved=None))
    reader.finish()
    gate, norm = gated(sizes.activation), plain_norm(sizes.eps)

    def load(weights: Weights, places: Places) -> Head:
        name = "mtp.layers.0"
        qkv = load_qkv(weights, f"{name}.self_attn", sizes.heads, queries_apart=can_run_blocks())
        output = load_output(weights, f"{name}.self_attn", sizes.heads)
        attention = Attention(places.own_attention, sizes.heads, qkv, output, rope=rope)
        block = pre_norm(weights, name, sizes, attention, gated_mlp(weights, name, sizes, gate), rope=_ROPE)
        return load_head(weights, QWEN, places, sizes.hidden, norm, [block], attention, rope=_ROPE, normed=normed)

    return HeadPlan(attention_specs(sizes, [None])[0], load, {_ROPE: rope}, chosen)
