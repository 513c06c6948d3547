"""The served models and their public names. HTTP requests name models, never paths."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ...errors import ServerError
from ..errors import no_such_model
from .model_slot import ModelSlot

if TYPE_CHECKING:
    from ...engine.async_llm import AsyncLLM

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*(?:/[A-Za-z0-9][A-Za-z0-9._:-]*)?")
LATEST = ":latest"
"""The tag of a name without a tag, which Ollama's clients add to names."""
_MAX_NAME = 128
"""Characters."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A loaded model in use by a request."""

    name: str
    """Public name, which answers contain whatever alias the request used."""
    llm: AsyncLLM
    adapter: str | None = None
    """The adapter that answers; None for the base model."""

    @property
    def base(self) -> str:
        """The name of the base model."""
        return _without_adapter(self.name, self.adapter)

    @property
    def blind_reason(self) -> str | None:
        """The reason why the model cannot see images; None if it can."""
        return blind_reason(self.llm)


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A public name. Names of the same files share a slot, so that the files are loaded once."""

    name: str
    slot: ModelSlot
    """The model, loaded or not."""
    adapter: str | None = None
    """The adapter that answers; None for the base model."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Creation time of the name, in seconds since 1970."""

    @property
    def base(self) -> str:
        """The name of the base model."""
        return _without_adapter(self.name, self.adapter)

    @property
    def may_see(self) -> bool:
        """True if the model sees images, or is not loaded, so that it may."""
        return self.slot.llm is None or blind_reason(self.slot.llm) is None

    def with_adapters(self) -> list[ModelEntry]:
        """The model, and each of its adapters as `name:adapter`."""
        return [self, *(replace(self, name=f"{self.name}:{adapter}", adapter=adapter) for adapter in self.slot.adapters)]


def _without_adapter(name: str, adapter: str | None) -> str:
    return name if adapter is None else name.removesuffix(f":{adapter}")


def blind_reason(llm: AsyncLLM) -> str | None:
    """The reason why a loaded model cannot see images; None if it can."""
    vision = llm.loaded.vision
    return vision if isinstance(vision, str) else None


class Registry:
    """The models by name.

    `aliases` maps further names to models. An alias that ends in `*` matches every name with this prefix. Raises `ServerError`.
    """

    def __init__(self, slots: Mapping[str, ModelSlot], aliases: Mapping[str, str] | None = None) -> None:
        self._entries = {check_name(name): ModelEntry(name, slot) for name, slot in slots.items()}
        for entry in self:
            entry.slot.names.append(entry.name)
        self._aliases = dict(aliases or {})
        for alias, name in self._aliases.items():
            check_name(alias.removesuffix("*"))
            if name not in self._entries:
                raise ServerError(f"the alias {alias!r} is for {name!r}, which is not among the models: {', '.join(self._entries)}")

    @classmethod
    def running(cls, models: Mapping[str, AsyncLLM], aliases: Mapping[str, str] | None = None) -> Registry:
        """A registry of models that are loaded already and stay loaded."""
        return cls({name: ModelSlot.running(llm) for name, llm in models.items()}, aliases)

    def __iter__(self) -> Iterator[ModelEntry]:
        return iter(self._entries.values())

    @property
    def slots(self) -> list[ModelSlot]:
        return list(dict.fromkeys(entry.slot for entry in self))

    @property
    def aliases(self) -> Mapping[str, str]:
        return self._aliases

    def listed(self) -> Iterator[tuple[str, ModelEntry]]:
        """Names for lists of models: every name, and every alias without `*`, each with its entry."""
        yield from ((each.name, each) for entry in self for each in entry.with_adapters())
        yield from ((alias, self._entries[name]) for alias, name in self._aliases.items() if not alias.endswith("*"))

    def entry(self, name: str) -> ModelEntry:
        """The model with this name or alias, with or without the tag `:latest`, or with `:` and the name of one of its adapters. The
        name of an adapter alone is enough if only one model has such an adapter. Raises `APIError` (404)."""
        found = self._by_name(name) or self._by_adapter(name.removesuffix(LATEST))
        if found is not None:
            return found
        raise no_such_model(name, [*(each.name for entry in self for each in entry.with_adapters()), *self._aliases])

    def _by_name(self, name: str) -> ModelEntry | None:
        for known in (name, name.removesuffix(LATEST)):
            found = self._entries.get(known) or self._entries.get(self._alias(known))
            if found is not None:
                return found
        return None

    def _by_adapter(self, name: str) -> ModelEntry | None:
        base, _, adapter = name.rpartition(":")
        entry = self._by_name(base) if base else None
        if entry is not None:
            return next((each for each in entry.with_adapters() if each.adapter == adapter), None)
        if ":" in name:
            return None
        # vLLM's clients name the adapter only.
        found = [each for entry in self for each in entry.with_adapters() if each.adapter == name]
        return found[0] if len({each.slot for each in found}) == 1 else None

    def _alias(self, name: str) -> str:
        if name in self._aliases:
            return self._aliases[name]
        matching = [alias for alias in self._aliases if alias.endswith("*") and name.startswith(alias[:-1])]
        return self._aliases[max(matching, key=len)] if matching else ""


def check_name(name: str) -> str:
    """The name, if it cannot be mistaken for a path. Raises `ServerError`."""
    if len(name) > _MAX_NAME or ".." in name or not _NAME.fullmatch(name):
        raise ServerError(
            f"{name!r} cannot be a public name: use letters, digits and . _ : - and at most one / (NAME=MODEL gives another name)"
        )
    return name


def public_name(model: str) -> tuple[str, str]:
    """The public name of a MODEL argument, and the model to load. `NAME=MODEL` gives both. Otherwise aliases and hub ids are their own
    names, and a path is named after its last part."""
    name, separator, target = model.partition("=")
    if separator and _NAME.fullmatch(name):
        return check_name(name), target
    if _NAME.fullmatch(model) and not model.endswith(".gguf"):
        return check_name(model), model
    last = re.sub(r"[^A-Za-z0-9._:-]+", "-", model.rstrip("/").rpartition("/")[2]).removesuffix(".gguf").strip("-.")
    return check_name(last), model
