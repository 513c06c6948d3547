"""The catalogue: short names of current models, with their place on the hub. Imports nothing heavy, for shell completion."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from ...util.dataclass import dataclass

_FILE = Path(__file__).with_name("known_models.json")


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model of the catalogue. Figures are those of the publisher's page, or of `source`."""

    name: str
    also: tuple[str, ...]
    """Other names, such as the family's for its usual size."""
    repo: str
    """`organization/name` on the hub."""
    nbytes: int
    """Size of the weights."""
    form: str
    """Format and bits of the weights."""
    parameters: float
    """Parameters, in billions."""
    active: float
    """Parameters that a token reads, in billions; fewer than all with experts."""
    context: int
    """Maximum tokens."""
    licence: str
    good_at: str
    source: str
    """Origin of `nbytes`."""
    file: str = ""
    """The GGUF file in `repo`; "" for all files."""
    revision: str = ""
    """Commit that `nbytes` belongs to, if known. Downloads take the newest one."""
    config_of: str = ""
    """Id of the published config behind `config`."""
    config: dict[str, Any] | None = None
    """Keys of config.json that decide the graph's shapes; None if the config is not known."""

    @property
    def hub_id(self) -> str:
        """The id that `resolve` accepts."""
        return f"{self.repo}/{self.file}" if self.file else self.repo

    @property
    def family(self) -> str:
        """The name without a size."""
        return self.name.partition(":")[0]

    @property
    def token_bytes(self) -> float:
        """Bytes of weights that one token reads."""
        return self.nbytes * self.active / self.parameters

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.also)


@cache
def known_models() -> tuple[KnownModel, ...]:
    """Read the catalogue, from the most capable model to the least; GGUF forms of earlier ones come last."""
    import json

    rows = json.loads(_FILE.read_text(encoding="utf-8"))
    return tuple(KnownModel(**{**row, "also": tuple(row["also"])}) for row in rows)


def find_known(text: str) -> KnownModel | None:
    """Return the model with a name such as `qwen3:8b`, `qwen3-8b` or `Qwen3`; None for another text."""
    return _by_name().get(_plain(text))


@cache
def _by_name() -> dict[str, KnownModel]:
    return {_plain(name): model for model in known_models() for name in model.names}


def _plain(name: str) -> str:
    return name.lower().replace(":", "-")


def search_known(text: str) -> list[KnownModel]:
    """Return the models that have every word of `text` in names, repository, strengths or licence."""
    words = text.lower().split()
    return [model for model in known_models() if all(any(word in part for part in _searched(model)) for word in words)]


def _searched(model: KnownModel) -> Iterator[str]:
    yield from (name.lower() for name in model.names)
    yield from (_plain(name) for name in model.names)
    yield from (part.lower() for part in (model.repo, model.form, model.good_at, model.licence))
