"""Strict reader of a Hugging Face config.

A graph reads every key that it supports. A remaining key is an error unless it changes no answer (`config_keys`) or the user ignores it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import SettingError, UnsupportedModelError
from ..util.typed_reader import TypedReader, shown
from .config_keys import harmless

_MANY = 1 << 16

IGNORED_KEYS = "_ignored_config_keys"
"""Key under which a config lists the keys that the user ignores."""


def way_on(key: str) -> str:
    """Return the end of an error about an unsupported key: the ways to continue."""
    return f"if you know that it changes no answer, ignore it: --ignore-config-key {key}, or ignore_config_keys=[{key!r}] in Python"


def with_ignored(config: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """Return the config with a list of those ignored keys that it has; a converted config has its list already."""
    present = _names(config)
    ignored = sorted({*(config.get(IGNORED_KEYS) or ()), *(key for key in keys if key in present)})
    return config | {IGNORED_KEYS: ignored} if ignored else config


def check_ignored(keys: Sequence[str], *configs: Mapping[str, Any]) -> None:
    """Raise `SettingError` for an ignored key that does not occur in any config."""
    for key in keys:
        if not any(key in _names(config) for config in configs):
            raise SettingError(f"ignore_config_keys: the model has no key {key!r}")


_BY_PATH: dict[Path, tuple[str, ...]] = {}


@contextmanager
def ignoring(path: Path, keys: Collection[str]) -> Iterator[None]:
    """Ignore these keys in every checkpoint that is opened at this path: a conversion or a comparison opens it many times."""
    before = _BY_PATH.get(path, ())
    _BY_PATH[path] = (*before, *keys)
    try:
        yield
    finally:
        _BY_PATH[path] = before


def ignored_keys(path: Path, keys: Collection[str] = ()) -> tuple[str, ...]:
    """Return these keys and those of `ignoring` for the path."""
    return (*keys, *_BY_PATH.get(path, ()))


def _names(config: Mapping[str, Any]) -> set[str]:
    """Return the keys of a config, of its text and vision configs, and of their rope parameters."""
    found = set(config)
    for name in config.get(IGNORED_KEYS) or ():  # keys of GGUF files, with or without the architecture's prefix
        found |= {name, name.partition(".")[2]}
    for key in ("text_config", "llm_config", "vision_config", "rope_parameters", "rope_scaling", "full_attention", "sliding_attention"):
        if isinstance(inner := config.get(key), Mapping):
            found |= _names(inner)
    return found


def ignored_note(config: Mapping[str, Any]) -> list[str]:
    """Return a note that lists a config's ignored keys; empty without any."""
    names = ", ".join(config.get(IGNORED_KEYS) or ())
    return [f"keys of the config ignored, as asked: {names}; answers are wrong if that changes what the model computes"] if names else []


class ConfigReader(TypedReader):
    """Typed reader of a config. Raises `UnsupportedModelError` with the key's name."""

    def error(self, key: str, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"config.json: {key} {what}")

    def skip(self, *keys: str) -> None:
        """Mark keys that this architecture does not use as read."""
        self._taken.update(keys)

    def only(self, key: str, *allowed: Any) -> None:
        """Accept a key only with these values, under which it changes nothing."""
        value = self.take(key)
        if value is not None and value not in allowed:
            raise self.bad(key, value, " or ".join(repr(item) for item in allowed))

    def count(self, key: str, default: int, *, low: int = 1) -> int:
        """Read a number of objects to create, with a bound that keeps hostile configs from exhausting memory."""
        value = self.integer(key, default, low=low)
        if value > _MANY:
            raise self.bad(key, value, f"at most {_MANY}")
        return value

    def nonzero(self, key: str, default: float) -> float:
        value = self.number(key, default)
        if value == 0:
            raise self.bad(key, value, "a number other than 0")
        return value

    def integers(self, key: str, count: int = 0) -> list[int] | None:
        """Return a list of at least `count` whole numbers; None for a missing or null key."""
        value = self.take(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < count or not all(isinstance(item, int) for item in value):
            raise self.bad(key, value, f"a list of {count} whole numbers" if count else "a list of whole numbers")
        return value

    def names(self, key: str, known: Sequence[str], count: int) -> list[str] | None:
        """Return one known name per layer; None for a missing or null key."""
        value = self.take(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < count:
            raise self.bad(key, value, f"a list of {count} names")
        for name in value[:count]:
            if name not in known:
                raise self.bad(key, name, f"one of {', '.join(known)}")
        return value[:count]

    def uniform_layers(self, kind: str) -> None:
        """Accept `layer_types` only if every layer is of `kind`."""
        value = self.take("layer_types")
        if value is not None and (not isinstance(value, list) or any(name != kind for name in value)):
            raise self.bad("layer_types", value, f"{kind} for every layer of this model")

    @property
    def ignored(self) -> frozenset[str]:
        """Keys that the user ignores."""
        return frozenset(self.values.get(IGNORED_KEYS) or ())

    def finish(self) -> None:
        """Raise for an unread key that may change the maths, and for an ignored key that was read."""
        for key in sorted(self.ignored & self._taken):
            if self.values.get(key) is not None:
                raise self.error(key, f"is read by this model ({self.values.get('model_type')}): it cannot be ignored")
        for key, value in self.untaken():
            if value is not None and key not in self.ignored and harmless(key, value) is None:
                unknown = f"= {shown(value)} is not understood by this model ({self.values.get('model_type')})"
                raise self.error(key, f"{unknown}, and may change its answers; {way_on(key)}")
