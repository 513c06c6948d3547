"""An architecture of GGUF files: how its config is rebuilt, and the names of its tensors.

Sources: `gguf/constants.py` of llama.cpp for the names, and its converter's classes for the edits, which `transforms.py` undoes. Names of
the model are those of mlx-lm's converted directories.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field

from ...util.dataclass import dataclass
from .base_config import Config, Source
from .transforms import Transform, half_rotation

MODEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
QKV = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"}
ATTENTION = {**QKV, "attn_norm": "input_layernorm", "attn_output": "self_attn.o_proj"}
QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
LLAMA = {**ATTENTION, **MLP, "ffn_norm": "post_attention_layernorm"}
POST_NORM = {**ATTENTION, **MLP, "post_attention_norm": "post_attention_layernorm"}
SANDWICH = {
    **ATTENTION,
    **QK_NORMS,
    **MLP,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def expert_names(router: str, experts: str) -> dict[str, str]:
    """Names of a router and of stacked experts."""
    return {"ffn_gate_inp": router} | {f"ffn_{part}_exps": f"{experts}.{part}_proj" for part in ("gate", "up", "down")}


def shared_expert_names(name: str) -> dict[str, str]:
    """Names of an expert that every token takes."""
    return {f"ffn_{part}_shexp": f"{name}.{part}_proj" for part in ("gate", "up", "down")}


EXPERTS = expert_names("mlp.gate", "mlp.switch_mlp")
BIASED = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
"""Bias of the scores by which experts are chosen."""
ROTATED = {"attn_q": half_rotation("num_attention_heads"), "attn_k": half_rotation("num_key_value_heads")}


@dataclass(frozen=True, slots=True)
class TensorTable:
    """Names of an architecture's tensors, and edits to undo."""

    layer: Mapping[str, str]
    """llama.cpp's names within a layer to the model's. Names without a suffix stand for a weight and a bias."""
    transforms: Mapping[str, Transform] = field(default_factory=dict)
    """Edits of llama.cpp's converter to undo, by llama.cpp's names."""
    model: Mapping[str, str] = field(default_factory=lambda: MODEL)
    """Names outside of layers."""
    layers: str = "model.layers"
    """Name of the layers, before their number."""
    joined: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Pairs of matrices that are one matrix of the model, in the order of their rows, by each of their names. The first has a place in
    `layer`."""


@dataclass(frozen=True, slots=True)
class GGUFArchitecture:
    """An entry of a family's `ARCHITECTURES`."""

    read_config: Callable[[Source], Config]
    """Rebuilds the Hugging Face config from the metadata."""
    table: TensorTable
    tables: Mapping[str, TensorTable] = field(default_factory=dict)
    """Tables for values of the config's `model_type` that need another one than `table`."""

    def table_of(self, config: Config) -> TensorTable:
        """Return the table for this config."""
        return self.tables.get(config["model_type"], self.table)
