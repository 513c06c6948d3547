"""Which kind each layer is, from a config that lists them or gives the rule."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import UnsupportedModelError
from .config import ConfigReader

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


def read_layer_types(reader: ConfigReader, known: tuple[str, ...], count: int, rule: Callable[[int], str]) -> list[str]:
    """`layer_types`, or where the config has none what the rule says of each layer."""
    return reader.names("layer_types", known, count) or [rule(layer) for layer in range(count)]


def windows(types: list[str], window: int | None) -> list[int | None]:
    """The window of each layer, None where it sees everything."""
    if window is None and SLIDING in types:
        raise UnsupportedModelError("config.json: layer_types has sliding_attention but sliding_window is not set")
    return [window if kind == SLIDING else None for kind in types]


def every(interval: int, nth: str, others: str) -> Callable[[int], str]:
    """A rule: each `interval`-th layer is one kind, all others are another."""
    return lambda layer: others if (layer + 1) % interval else nth
