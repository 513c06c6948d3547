"""Renames the tensors of a GGUF file to the names of mlx-lm's converted directories, by the table of its architecture."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from .architecture import QKV, TensorTable
from .base_config import ROPE_TENSORS, Config
from .families import find_architecture
from .ollama_form import ALTERNATING
from .reader import TensorInfo
from .transforms import MappedTensor, every_second, interleaved_qkvz, joined_rows, piece, scaled, unchanged

_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_OLD_EXPERT = re.compile(r"ffn_(gate|up|down)\.(\d+)\.weight")
"""Mixtral's experts before they were stacked, in files of 2023 and early 2024."""
_OLD_EXPERT_PARTS = {"gate": "w1", "down": "w2", "up": "w3"}


def map_tensors(infos: Mapping[str, TensorInfo], architecture: str, config: Config, blocks: int) -> dict[str, MappedTensor]:
    """Map every tensor of the file to the model's name. A tensor without a place keeps its name, for the loader to refuse.

    `blocks` counts the layers of the file. Those beyond the config's are draft layers and are left out. Raises `ValueError` for two
    tensors with one place.
    """
    table = find_architecture(architecture).table_of(config)
    placed: dict[str, MappedTensor] = {}
    for name, mapped in _Mapper(table, infos, config, blocks).all():
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
                yield self._renamed(info, info.name, self._table.model, "")
            elif int(match[1]) not in self._skipped:
                yield from self._in_layer(info, f"blk.{match[1]}.", match[2], f"{self._table.layers}.{match[1]}.")

    def _is_scale(self, name: str) -> bool:
        """True for a scale: scales of whole weights are multiplied into them, those of quantized activations are ignored."""
        stem, _, suffix = name.rpartition(".")
        return self._scale_of(stem) is not None if suffix == "scale" else suffix == "input_scale" and f"{stem}.weight" in self._infos

    def _scale_of(self, stem: str) -> TensorInfo | None:
        """The scale of a weight, with one number or one per expert."""
        weight, scale = self._infos.get(f"{stem}.weight"), self._infos.get(f"{stem}.scale")
        if f"{stem.split('.', 2)[-1]}.scale" in self._table.layer:
            return None  # one of the model's own tensors
        if weight is None or scale is None or not weight.shape:
            return None
        experts = weight.shape[0] if len(weight.shape) == 3 else 1
        return scale if math.prod(scale.shape) in (1, experts) else None

    def _in_layer(self, info: TensorInfo, source: str, name: str, target: str) -> Iterator[tuple[str, MappedTensor]]:
        stem, _, suffix = name.rpartition(".")
        expert = _OLD_EXPERT.fullmatch(name)
        if stem in ("attn_qkv", "attn_gate") and stem not in self._table.layer:
            yield from self._split_qkv(info, source, stem, suffix, target)
        elif stem in self._table.joined:
            yield from self._joined_matrix(info, source, stem, suffix, target)
        elif name == "ffn_gate_up_exps.weight":
            yield from self._split_rows(info, target, suffix, {self._table.layer.get(f"ffn_{part}_exps"): 1 for part in ("gate", "up")})
        elif stem == ALTERNATING:
            for first, part in enumerate(("gate", "up")):
                place = self._table.layer.get(f"ffn_{part}_exps")
                yield (f"{target}{place}.{suffix}", every_second(info, first)) if place else (info.name, unchanged(info))
        elif expert:
            yield f"{target}block_sparse_moe.experts.{expert[2]}.{_OLD_EXPERT_PARTS[expert[1]]}.weight", unchanged(info)
        else:
            yield self._renamed(info, name, self._table.layer, target)

    def _joined_matrix(self, info: TensorInfo, source: str, stem: str, suffix: str, target: str) -> Iterator[tuple[str, MappedTensor]]:
        """Join two matrices of the file into one of the model, at the place of the first."""
        parts = self._table.joined[stem]
        infos = [self._infos.get(f"{source}{part}.{suffix}") for part in parts]
        known = [one for one in infos if one is not None and not self._scale_of(f"{source}{stem}")]
        if len(known) < len(parts) or any(len(one.shape) != 2 or one.shape[-1] != known[0].shape[-1] for one in known):
            yield info.name, unchanged(info)
        elif stem == parts[0]:
            yield f"{target}{self._table.layer[stem]}.{suffix}", joined_rows(known, lambda rows: rows)

    def _renamed(self, info: TensorInfo, name: str, names: Mapping[str, str], target: str) -> tuple[str, MappedTensor]:
        stem, _, suffix = name.rpartition(".")
        if name in names:
            place = names[name]
        elif stem in names:
            place = f"{names[stem]}.{suffix}"
        else:
            return info.name, unchanged(info)
        transform = self._table.transforms.get(name) or self._table.transforms.get(stem) or _keep_tensor
        return target + place, self._with_scale(info, transform(info, self._config))

    def _split_qkv(self, info: TensorInfo, source: str, stem: str, suffix: str, target: str) -> Iterator[tuple[str, MappedTensor]]:
        """Split queries, keys and values of one tensor. A recurrent layer has a gate tensor as well."""
        qkv, gate = self._infos.get(f"{source}attn_qkv.weight"), self._infos.get(f"{source}attn_gate.weight")
        if qkv is not None and gate is not None and "linear_num_key_heads" in self._config:
            if self._scale_of(f"{source}attn_qkv") or self._scale_of(f"{source}attn_gate"):
                yield info.name, unchanged(info)
            elif stem == "attn_qkv":
                yield f"{target}linear_attn.in_proj_qkvz.weight", interleaved_qkvz(qkv, gate, self._config)
        elif stem == "attn_qkv":
            heads, kv = self._config["num_attention_heads"], self._config["num_key_value_heads"]
            yield from self._split_rows(info, target, suffix, dict(zip(QKV.values(), (heads, kv, kv), strict=True)))
        else:
            yield info.name, unchanged(info)

    def _split_rows(
        self, info: TensorInfo, target: str, suffix: str, parts: Mapping[str | None, int]
    ) -> Iterator[tuple[str, MappedTensor]]:
        """Split the rows of a tensor in proportion to `parts`."""
        count = info.shape[-1 if len(info.shape) == 1 else -2] if info.shape else 1
        unit, rest = divmod(count, sum(parts.values()))
        if rest or None in parts:
            yield info.name, unchanged(info)
            return
        start = 0
        for name, share in parts.items():
            stop = start + share * unit
            stem = next((stem for stem, place in self._table.layer.items() if place == name), "")
            transform = self._table.transforms.get(stem, _keep_tensor)
            yield f"{target}{name}.{suffix}", self._with_scale(info, piece(info, start, stop, transform, self._config))
            start = stop

    def _with_scale(self, info: TensorInfo, mapped: MappedTensor) -> MappedTensor:
        stem, _, suffix = info.name.rpartition(".")
        scale = self._scale_of(stem) if suffix == "weight" else None
        return mapped if scale is None else scaled(mapped, scale)


def _keep_tensor(info: TensorInfo, config: Config) -> MappedTensor:
    return unchanged(info)
