"""Heads that draft: the checkpoint's own, or another directory's, whose tensors then count as the checkpoint's."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import CheckpointError, DraftError
from ..models.llama_head import is_head
from ..nn.weights import Format, Matrix
from .checkpoint import Checkpoint
from .files import read_json_if_there

OWN = "mtp"
"""What stands for the head in the model's own checkpoint, instead of a path."""


def head_in(path: str | Path | None) -> bool | Path:
    """Whether what somebody named to draft is a head: True for the checkpoint's own, a path for a directory that holds one, False for a
    model."""
    if path is None:
        return False
    if str(path) == OWN:
        return True
    directory = Path(path).expanduser()
    return directory if directory.is_dir() and is_head(read_json_if_there(directory / "config.json")) else False


def is_of_head(name: str) -> bool:
    """Whether a tensor belongs to a head by its name."""
    return name.startswith("mtp.")


class WithHead:
    """A checkpoint and a head's: implements `Checkpoint`. Names of the head begin with "mtp."."""

    def __init__(self, model: Checkpoint, head: Checkpoint) -> None:
        self.model = model
        self.head = head
        self.path = model.path
        self.config = model.config

    def _of(self, name: str) -> Checkpoint:
        return self.head if is_of_head(name) else self.model

    def names(self) -> Collection[str]:
        return [*(name for name in self.model.names() if not is_of_head(name)), *self.head.names()]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._of(name).shape(name)

    def nbytes(self, name: str) -> int:
        return self._of(name).nbytes(name)

    def stored(self, name: str) -> Format | mx.Dtype:
        return self._of(name).stored(name)

    def kind(self, name: str) -> str:
        return self._of(name).kind(name)

    def unpacked_from(self, name: str) -> str | None:
        return self._of(name).unpacked_from(name)

    def read(self, name: str) -> Matrix:
        return self._of(name).read(name)

    def close(self) -> None:
        self.head.close()


@contextmanager
def with_head(checkpoint: Checkpoint, mtp: bool | Path) -> Iterator[tuple[Checkpoint, bool | Mapping[str, Any]]]:
    """The checkpoint with the tensors of a head, and what `models.build` needs to know of it. Raises `DraftError`, `CheckpointError`."""
    if isinstance(mtp, bool):
        yield checkpoint, mtp
        return
    from .directory import SafetensorsCheckpoint

    try:
        head = SafetensorsCheckpoint(mtp)
    except CheckpointError as error:
        raise DraftError(f"the head cannot be read: {error}") from None
    both = WithHead(checkpoint, head)
    try:
        foreign = [name for name in head.names() if not is_of_head(name)]
        if foreign:
            raise DraftError(f"{mtp}: {foreign[0]} is not a tensor of a head, whose names begin with mtp.")
        yield both, head.config
    finally:
        both.close()
