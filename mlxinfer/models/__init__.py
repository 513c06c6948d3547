"""Model graphs: a table from `model_type` to the family that reads the config and builds the graph."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from ..errors import UnsupportedModelError
from ..nn.weights import Weights
from .base import Model
from .decoder import Decoder, keep_lazy

__all__ = ["FAMILIES", "Model", "build", "is_unused", "supports"]

FAMILIES = {
    "llama": "llama",
    "mistral": "llama",
}
"""`model_type` to the module under `families` that has a function of that name."""

_UNUSED_ENDINGS = (".rotary_emb.inv_freq", ".masked_bias")
_UNUSED_STARTS: dict[str, tuple[str, ...]] = {}


def supports(model_type: str) -> bool:
    """Whether this architecture has a graph of its own; others may run through `zoo`."""
    return model_type in FAMILIES


def build(config: dict[str, Any], weights: Weights, ready: Callable[[object], None] = keep_lazy) -> Model:
    """The model of a config, its tensors asked of `weights`.

    `ready` is called with each finished part of the model, for a loader to evaluate (see `Decoder`). Raises `UnsupportedModelError`
    before any tensor is asked for, if the config holds something that is not understood.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not supports(model_type):
        raise UnsupportedModelError(f"architecture {model_type!r} is not supported (known: {', '.join(FAMILIES)})")
    family = import_module(f".families.{FAMILIES[model_type]}", __package__)
    return Decoder(model_type, getattr(family, model_type)(config), weights, ready)


def is_unused(model_type: str, name: str) -> bool:
    """Whether a tensor is known to have no part in inference, so that a checkpoint may hold it although no model asks for it."""
    return name.endswith(_UNUSED_ENDINGS) or name.startswith(_UNUSED_STARTS.get(model_type, ("\0",)))
