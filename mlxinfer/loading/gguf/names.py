"""From llama.cpp's tensor names to those of mlx-lm's converted directories, per architecture.

Sources: `gguf/constants.py` for the names, and the converter's classes for what they do to the tensors; `transforms.py` undoes that.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import field

from ...records import dataclass
from .base_config import ROPE_TENSORS, Config
from .reader import TensorInfo
from .transforms import (
    MappedTensor,
    Transform,
    conv_kernel,
    decay,
    grouped_columns,
    grouped_rows,
    grouped_value_rows,
    half_rotation,
    interleaved_qkvz,
    one_row,
    piece,
    scaled,
    unchanged,
    without_one,
)

_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_OLD_EXPERT = re.compile(r"ffn_(gate|up|down)\.(\d+)\.weight")
"""Mixtral's experts before they were stacked, in files of 2023 and early 2024."""
_OLD_EXPERT_PARTS = {"gate": "w1", "down": "w2", "up": "w3"}

_MODEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_QKV = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"}
_ATTENTION = {**_QKV, "attn_norm": "input_layernorm", "attn_output": "self_attn.o_proj"}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_LLAMA = {**_ATTENTION, **_MLP, "ffn_norm": "post_attention_layernorm"}
_SANDWICH = {
    **_ATTENTION,
    **_QK_NORMS,
    **_MLP,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_DELTA = {
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "post_attention_norm": "post_attention_layernorm",
}


def _experts(router: str, experts: str) -> dict[str, str]:
    return {"ffn_gate_inp": router} | {f"ffn_{part}_exps": f"{experts}.{part}_proj" for part in ("gate", "up", "down")}


@dataclass(frozen=True, slots=True)
class TensorTable:
    """Where the tensors of one architecture go, and what is done to them."""

    layer: Mapping[str, str]
    """llama.cpp's names within a layer to the model's, without a suffix where both a weight and a bias may come."""
    transforms: Mapping[str, Transform] = field(default_factory=dict)
    """By llama.cpp's names, what its converter did that has to be undone."""


_ROTATED = {"attn_q": half_rotation("num_attention_heads"), "attn_k": half_rotation("num_key_value_heads")}
_NORMS = ("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm", "attn_q_norm", "attn_k_norm", "output_norm")
_SHIFTED = dict.fromkeys(_NORMS, without_one)

_TABLES: dict[str, TensorTable] = {
    "llama": TensorTable(_LLAMA, _ROTATED),
    "mixtral": TensorTable(_LLAMA | _experts("block_sparse_moe.gate", "block_sparse_moe.switch_mlp"), _ROTATED),
    "qwen2": TensorTable(_LLAMA),
    "qwen3": TensorTable(_LLAMA | _QK_NORMS),
    "qwen3moe": TensorTable(_LLAMA | _QK_NORMS | _experts("mlp.gate", "mlp.switch_mlp")),
    "gemma2": TensorTable(_SANDWICH, _SHIFTED),
    "gemma3": TensorTable(_SANDWICH, _SHIFTED),
    "phi3": TensorTable(_LLAMA | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
    "granite": TensorTable(_LLAMA, _ROTATED),
    "olmo2": TensorTable(_SANDWICH),
    "smollm3": TensorTable(_LLAMA, _ROTATED),
    "gpt-oss": TensorTable(
        _ATTENTION
        | _experts("mlp.router", "mlp.experts")
        | {"attn_sinks.weight": "self_attn.sinks", "post_attention_norm": "post_attention_layernorm"}
    ),
    "qwen3next": TensorTable(
        _ATTENTION
        | _QK_NORMS
        | _experts("mlp.gate", "mlp.switch_mlp")
        | _SHARED_EXPERT
        | _DELTA
        | {"ssm_ba": "linear_attn.in_proj_ba", "ssm_in": "linear_attn.in_proj_qkvz"},
        {"ssm_a": decay(grouped=False), "ssm_conv1d": conv_kernel(grouped=False), "ffn_gate_inp_shexp": one_row},
    ),
    "qwen35": TensorTable(
        _ATTENTION
        | _QK_NORMS
        | _MLP
        | _DELTA
        | {
            "attn_qkv": "linear_attn.in_proj_qkv",
            "attn_gate": "linear_attn.in_proj_z",
            "ssm_alpha": "linear_attn.in_proj_a",
            "ssm_beta": "linear_attn.in_proj_b",
        },
        {
            "attn_qkv": grouped_value_rows,
            "attn_gate": grouped_rows,
            "ssm_alpha": grouped_rows,
            "ssm_beta": grouped_rows,
            "ssm_dt.bias": grouped_rows,
            "ssm_a": decay(grouped=True),
            "ssm_conv1d": conv_kernel(grouped=True),
            "ssm_out": grouped_columns,
        },
    ),
}


def map_tensors(infos: Mapping[str, TensorInfo], architecture: str, config: Config, blocks: int) -> dict[str, MappedTensor]:
    """Every tensor of the file under the name of the model's; one without a place keeps its own, for the loader to refuse.

    `blocks` counts the layers of the file. Those beyond the config's predict further tokens and are left out. Raises `ValueError`
    for two tensors with one place.
    """
    key = "mixtral" if config["model_type"] == "mixtral" else architecture
    placed: dict[str, MappedTensor] = {}
    for name, mapped in _Mapper(_TABLES[key], infos, config, blocks).all():
        if name in placed:
            raise ValueError(f"{mapped.sources[0]} and {placed[name].sources[0]} are both {name}")
        placed[name] = mapped
    return placed


class _Mapper:
    def __init__(self, table: TensorTable, infos: Mapping[str, TensorInfo], config: Config, blocks: int) -> None:
        self._table, self._infos, self._config = table, infos, config
        self._skipped = range(config["num_hidden_layers"], blocks)

    def all(self) -> Iterator[tuple[str, MappedTensor]]:
        for info in self._infos.values():
            if info.name in ROPE_TENSORS or self._is_scale(info.name):
                continue
            match = _LAYER.fullmatch(info.name)
            if not match:
                yield self._placed(info, info.name, _MODEL, "")
            elif int(match[1]) not in self._skipped:
                yield from self._in_layer(info, f"blk.{match[1]}.", match[2], f"model.layers.{match[1]}.")

    def _is_scale(self, name: str) -> bool:
        """Scales of whole weights are multiplied into them; those of quantized activations are of no use here."""
        stem, _, suffix = name.rpartition(".")
        return self._scale_of(stem) is not None if suffix == "scale" else suffix == "input_scale" and f"{stem}.weight" in self._infos

    def _scale_of(self, stem: str) -> TensorInfo | None:
        """The scale of a weight: one number, or one for each expert."""
        weight, scale = self._infos.get(f"{stem}.weight"), self._infos.get(f"{stem}.scale")
        if weight is None or scale is None or not weight.shape:
            return None
        experts = weight.shape[0] if len(weight.shape) == 3 else 1
        return scale if math.prod(scale.shape) in (1, experts) else None

    def _in_layer(self, info: TensorInfo, source: str, name: str, target: str) -> Iterator[tuple[str, MappedTensor]]:
        stem, _, suffix = name.rpartition(".")
        expert = _OLD_EXPERT.fullmatch(name)
        if stem in ("attn_qkv", "attn_gate") and stem not in self._table.layer:
            yield from self._fused(info, source, stem, suffix, target)
        elif name == "ffn_gate_up_exps.weight":
            yield from self._split(info, target, suffix, {self._table.layer.get(f"ffn_{part}_exps"): 1 for part in ("gate", "up")})
        elif expert:
            yield f"{target}block_sparse_moe.experts.{expert[2]}.{_OLD_EXPERT_PARTS[expert[1]]}.weight", unchanged(info)
        else:
            yield self._placed(info, name, self._table.layer, target)

    def _placed(self, info: TensorInfo, name: str, names: Mapping[str, str], target: str) -> tuple[str, MappedTensor]:
        stem, _, suffix = name.rpartition(".")
        if name in names:
            place = names[name]
        elif stem in names:
            place = f"{names[stem]}.{suffix}"
        else:
            return info.name, unchanged(info)
        transform = self._table.transforms.get(name) or self._table.transforms.get(stem) or _keep
        return target + place, self._scaled(info, transform(info, self._config))

    def _fused(self, info: TensorInfo, source: str, stem: str, suffix: str, target: str) -> Iterator[tuple[str, MappedTensor]]:
        """Queries, keys and values in one tensor; in a recurrent layer there is a gate tensor as well."""
        qkv, gate = self._infos.get(f"{source}attn_qkv.weight"), self._infos.get(f"{source}attn_gate.weight")
        if qkv is not None and gate is not None and "linear_num_key_heads" in self._config:
            if self._scale_of(f"{source}attn_qkv") or self._scale_of(f"{source}attn_gate"):
                yield info.name, unchanged(info)
            elif stem == "attn_qkv":
                yield f"{target}linear_attn.in_proj_qkvz.weight", interleaved_qkvz(qkv, gate, self._config)
        elif stem == "attn_qkv":
            heads, kv = self._config["num_attention_heads"], self._config["num_key_value_heads"]
            yield from self._split(info, target, suffix, dict(zip(_QKV.values(), (heads, kv, kv), strict=True)))
        else:
            yield info.name, unchanged(info)

    def _split(self, info: TensorInfo, target: str, suffix: str, parts: Mapping[str | None, int]) -> Iterator[tuple[str, MappedTensor]]:
        """Take the rows of a tensor apart in proportion to `parts`."""
        count = info.shape[-1 if len(info.shape) == 1 else -2] if info.shape else 1
        unit, rest = divmod(count, sum(parts.values()))
        if rest or None in parts:
            yield info.name, unchanged(info)
            return
        start = 0
        for name, share in parts.items():
            stop = start + share * unit
            stem = next((stem for stem, place in self._table.layer.items() if place == name), "")
            transform = self._table.transforms.get(stem, _keep)
            yield f"{target}{name}.{suffix}", self._scaled(info, piece(info, start, stop, transform, self._config))
            start = stop

    def _scaled(self, info: TensorInfo, mapped: MappedTensor) -> MappedTensor:
        stem, _, suffix = info.name.rpartition(".")
        scale = self._scale_of(stem) if suffix == "weight" else None
        return mapped if scale is None else scaled(mapped, scale)


def _keep(info: TensorInfo, config: Config) -> MappedTensor:
    return unchanged(info)
