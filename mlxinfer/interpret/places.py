"""The places of a model that can be traced or changed, and checks of their names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Union

from ..cache.base import AttentionSpec
from ..errors import SettingError, UnsupportedModelError
from ..models.block import Block
from ..models.decoder import Decoder, Model
from ..models.hooks import ATTENTION_OUT, HEADS, MLP, RESIDUAL, ROUTER

ATTENTION, KV, LOGITS = "attention", "kv", "logits"

TRACED = (RESIDUAL, ATTENTION, ATTENTION_OUT, HEADS, MLP, ROUTER, KV, LOGITS)
"""Places that a trace can have."""

Layers = Union[int, Iterable[int], None]
"""One layer, several, or None for all."""


def native(model: Model) -> Decoder:
    """The model as a native graph. Raises `UnsupportedModelError` for mlx-lm's graphs, for models on several machines, and for families
    whose blocks are not attention followed by a feed-forward layer."""
    if not isinstance(model, Decoder):
        raise UnsupportedModelError(
            f"{model.model_type} runs on mlx-lm's graph, which cannot be looked into: choose a model with a native one"
        )
    if model.divided:
        raise UnsupportedModelError(f"{model.model_type} runs on several machines, which cannot be looked into: load it on one")
    if not all(isinstance(block, Block) for block in model.blocks):
        raise UnsupportedModelError(f"{model.model_type} has blocks of its own build, which cannot be looked into: choose another model")
    return model


def checked_names(what: Union[str, Iterable[str]], known: Sequence[str]) -> tuple[str, ...]:
    """Names of places as a tuple. Raises `SettingError` for a name that is not `known`."""
    names = (what,) if isinstance(what, str) else tuple(what)
    for name in names:
        if name not in known:
            near = get_close_matches(str(name), known, 1)
            raise SettingError(
                f"{name!r} is no part of a model: {f'did you mean {near[0]!r}?' if near else 'choose of ' + ', '.join(known)}"
            )
    return names


def place_to_change(what: str) -> str:
    """The place that `what` names in an intervention; "attention" is the output of attention there."""
    (name,) = checked_names(what, (RESIDUAL, ATTENTION, ATTENTION_OUT, HEADS, MLP))
    return ATTENTION_OUT if name == ATTENTION else name


def checked_layers(model: Decoder, layers: Layers, *, place: str) -> tuple[int, ...]:
    """Layers in ascending order. The stream has one more than the model: the output of the last block. Raises `SettingError`."""
    count = len(model.blocks) + (place == RESIDUAL)
    if layers is None:
        return tuple(range(count))
    wanted = (layers,) if isinstance(layers, int) else tuple(layers)
    for layer in wanted:
        if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < count:
            raise SettingError(f"layer {layer!r} is not one of 0 to {count - 1}" + (f" (of {place})" if place else ""))
    return tuple(sorted(set(wanted)))


def attends(model: Decoder, layer: int) -> bool:
    """True if a layer is attention, False if it has a recurrent state."""
    return isinstance(model.layers[layer], AttentionSpec)


def checked_heads(model: Decoder, layers: Iterable[int], heads: Iterable[int] | None) -> tuple[int, ...] | None:
    """Heads as a tuple; None for all. Raises `SettingError`."""
    if heads is None:
        return None
    wanted = (heads,) if isinstance(heads, int) else tuple(heads)
    for layer in layers:
        spec = model.layers[layer]
        if not isinstance(spec, AttentionSpec):
            raise SettingError(f"layer {layer} is no attention layer and has no heads")
        for head in wanted:
            if isinstance(head, bool) or not isinstance(head, int) or not 0 <= head < spec.query_heads:
                raise SettingError(f"head {head!r} is not one of 0 to {spec.query_heads - 1} of layer {layer}")
    return wanted
