"""The models of the catalogue that fit this machine best."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from ...errors import MLXInferError
from ...models import build
from ...models.decoder import Model
from ...nn.weights import Format
from ...util.dataclass import dataclass
from ...util.device import DeviceMemory, default_dtype, device_memory
from ..memory.plan import GOOD_CONTEXT, plan_memory, usable_memory
from ..weights import EmptyWeights
from .known import KnownModel, known_models

LEAST_SPEED = 8.0
"""Tokens per second below which reading an answer becomes waiting."""

_TIED_BY_DEFAULT = ("smollm3",)
"""`model_type`s that share embedding and output matrix unless the config says otherwise, as in transformers."""


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A model that fits, with the package's own plan of the memory for one conversation."""

    model: KnownModel
    context: int
    """Tokens of context that fit beside the weights."""
    speed: float | None
    """Tokens per second at most, computed; None if the bandwidth of the memory is not known."""


def recommend(memory_gb: float | None = None, read_bytes: float | None = None, count: int = 3) -> list[Recommendation]:
    """Return the first models of the catalogue that fit with a context of 8192 tokens, of different makers.

    `memory_gb` replaces this machine's memory for weights and cache. `read_bytes` is the bandwidth of the memory per second: models that
    it makes slow come last.
    """
    memory = device_memory() if memory_gb is None else DeviceMemory(total=int(memory_gb * 1e9), usable=int(memory_gb * 1e9))
    fast: list[Recommendation] = []
    slow: list[Recommendation] = []
    for model in known_models():
        found = _fitting(model, memory, read_bytes)
        if found is not None and _maker(model) not in {_maker(one.model) for one in fast}:
            (slow if found.speed is not None and found.speed < LEAST_SPEED else fast).append(found)
        if len(fast) == count:
            break
    slow.sort(key=lambda one: -(one.speed or 0.0))
    taken: dict[str, Recommendation] = {}
    for one in [*fast, *slow]:
        taken.setdefault(_maker(one.model), one)
    return list(taken.values())[:count]


def _fitting(model: KnownModel, memory: DeviceMemory, read_bytes: float | None) -> Recommendation | None:
    """Plan the memory of a model. None if it does not fit, or if its config is not in the catalogue."""
    if model.config is None or model.nbytes >= usable_memory(memory=memory):
        return None
    try:
        plan = plan_memory(outline(model.config, default_dtype(), weight_bytes=model.nbytes), max_num_seqs=1, memory=memory)
    except MLXInferError:
        return None
    if plan.context < min(GOOD_CONTEXT, model.context):
        return None
    return Recommendation(model, min(plan.context, model.context), read_bytes / model.token_bytes if read_bytes else None)


def _maker(model: KnownModel) -> str:
    """The letters that a name begins with, such as `qwen` of `qwen3-coder:30b`."""
    found = re.match("[a-z]+", model.name)
    return found[0] if found else model.name


@dataclass(frozen=True, slots=True)
class OutlinedModel:
    """A model that `plan_memory` plans by its config."""

    model: Model
    weight_bytes: int
    dtype: mx.Dtype
    load_bytes: int = 0
    """0: the largest tensor is not known."""


def outline(config: Mapping[str, Any], dtype: mx.Dtype, form: Format | None = None, weight_bytes: int | None = None) -> OutlinedModel:
    """Build the graph of a config for activations in `dtype`. `form` is that of the matrices, by default MLX's 4 bits in groups of 64.

    `weight_bytes` is the size of the weights, by default that of the graph's tensors. Raises `UnsupportedModelError`.
    """
    text = config.get("text_config", config)
    tied = bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", text.get("model_type") in _TIED_BY_DEFAULT)))
    weights = EmptyWeights(form or Format(4, 64), tied=tied)
    model = build(dict(config), weights)
    return OutlinedModel(model, weights.nbytes if weight_bytes is None else weight_bytes, dtype)
