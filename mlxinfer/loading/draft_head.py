"""Draft heads: the checkpoint's own, or one in another directory, whose tensors then count as the checkpoint's."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import CheckpointError, DraftError, WeightsError
from ..models.heads.kinds import kind_of
from ..nn.weights import Dense, Format, Matrix
from .checkpoint import Checkpoint
from .files import read_json_if_there
from .skipped import OF_HEADS

OWN = "mtp"
"""Value of `--draft` for the head in the model's own checkpoint."""


def head_in(path: str | Path | None) -> bool | Path:
    """Resolve `--draft`: True for the checkpoint's own head, a path for a head directory, False for a draft model or None."""
    if path is None:
        return False
    if str(path) == OWN:
        return True
    directory = Path(path).expanduser()
    return directory if directory.is_dir() and kind_of(read_json_if_there(directory / "config.json")) else False


def is_of_head(name: str) -> bool:
    """True if a tensor's name belongs to a head."""
    return name.startswith("mtp.")


class WithHead:
    """The tensors of a checkpoint and of a separate head; implements `Checkpoint`. Here names of the head start with "mtp."."""

    def __init__(self, model: Checkpoint, head: Checkpoint, own: Mapping[str, str]) -> None:
        """`own` maps names of the head's tensors here to names in its file."""
        self.model = model
        self.head = head
        self.path = model.path
        self.config = model.config
        self._own = own

    def check_used(self, skipped: Mapping[str, str]) -> None:
        """Raise `DraftError` if the graph did not use a tensor of the head. `skipped` has the unused tensors, with reasons."""
        for name, reason in skipped.items():
            if name in self._own and reason == OF_HEADS:
                raise DraftError(f"{self.head.path}: {self._own[name]} is unexpected")

    def _origin(self, name: str) -> tuple[Checkpoint, str]:
        return (self.head, self._own[name]) if is_of_head(name) else (self.model, name)

    def names(self) -> Collection[str]:
        return [*(name for name in self.model.names() if not is_of_head(name)), *self._own]

    def shape(self, name: str) -> tuple[int, ...]:
        of, stored = self._origin(name)
        return of.shape(stored)

    def nbytes(self, name: str) -> int:
        of, stored = self._origin(name)
        return of.nbytes(stored)

    def stored(self, name: str) -> Format | mx.Dtype:
        of, stored = self._origin(name)
        return of.stored(stored)

    def kind(self, name: str) -> str:
        of, stored = self._origin(name)
        return of.kind(stored)

    def unpacked_from(self, name: str) -> str | None:
        of, stored = self._origin(name)
        return of.unpacked_from(stored)

    def read(self, name: str) -> Matrix:
        of, stored = self._origin(name)
        return of.read(stored)

    def close(self) -> None:
        self.head.close()


@contextmanager
def with_head(checkpoint: Checkpoint, mtp: Path) -> Iterator[tuple[Checkpoint, Mapping[str, Any]]]:
    """Yield the checkpoint with the tensors of the head in the directory `mtp`, and the head's config for `models.build`.

    The config has the head's tables of tokens as lists. Raises `DraftError`, `CheckpointError`.
    """
    from .directory import SafetensorsCheckpoint

    try:
        head = SafetensorsCheckpoint(mtp)
    except CheckpointError as error:
        raise DraftError(f"the head cannot be read: {error}") from None
    try:
        tables, own = _token_tables(head), _head_names(head)
        yield WithHead(checkpoint, head, own), {**head.config, **tables}
    except WeightsError as error:
        if f"{checkpoint.path}: mtp." not in str(error):
            raise
        raise DraftError(str(error).replace(f"{checkpoint.path}:", f"{mtp}:").replace(" mtp.", " ")) from None
    finally:
        head.close()


def _head_names(head: Checkpoint) -> dict[str, str]:
    """Map names of the head's floating-point tensors here to names in its file. Raises `DraftError`."""
    names = [name for name in head.names() if name not in _TABLES]
    if kind_of(head.config) != "llama":
        return {f"mtp.{name.replace('midlayer.', 'layers.0.')}": name for name in names}
    foreign = [name for name in names if not is_of_head(name)]
    if foreign:
        raise DraftError(f"{head.path}: {foreign[0]} is not a tensor of a head, whose names begin with mtp.")
    return {name: name for name in names}


_TABLES = {"d2t": "d2t", "t2d": "t2d", "masked_embedding.token_ordering": "token_ordering"}
"""Integer tables that heads store as tensors, and their keys in the config."""


def _token_tables(head: Checkpoint) -> dict[str, list[int]]:
    found = {}
    for name, key in _TABLES.items():
        if name not in head.names():
            continue
        kind, shape = head.stored(name), head.shape(name)
        if isinstance(kind, Format) or mx.issubdtype(kind, mx.floating) or len(shape) != 1:
            raise DraftError(f"{head.path}: {name} must be a list of whole numbers")
        table = head.read(name)
        assert isinstance(table, Dense)
        numbers: list[int] = table.weight.tolist()  # type: ignore[assignment]
        found[key] = numbers
    return found
