"""Small files of the disk tier."""

from __future__ import annotations

import hashlib
from pathlib import Path
from threading import Event

import numpy as np

from mlxinfer.cache.disk.pagefile import DataLayout, Entry, Tensor
from mlxinfer.cache.disk.storage import DiskStorage

ROOT = hashlib.blake2b(b"root", digest_size=32).digest()
LAYOUT = DataLayout([Tensor("layers.0.0", "F32", (2, 3, 4)), Tensor("layers.0.1", "BF16", (2, 5)), Tensor("layers.1.0", "U32", (3,))])
BIG = DataLayout([Tensor("layers.0.0", "U32", (4096,))])


def entry(number: int, *, root: bytes = ROOT, layout: DataLayout = LAYOUT, part: str = "full") -> Entry:
    """The page `number` of a chain."""
    return Entry(root, digest(number), digest(number - 1), part, tuple(range(number, number + 64)), layout)


def digest(number: int) -> bytes:
    return hashlib.blake2b(str(number).encode(), digest_size=32).digest()


def content(one: Entry) -> np.ndarray:
    """Bytes that belong to this entry only."""
    seed = int.from_bytes(one.digest[:4], "little") + len(one.part)
    return np.random.default_rng(seed).integers(0, 256, one.layout.nbytes, dtype=np.uint8)


def path_of(directory: Path, one: Entry) -> Path:
    return directory / one.root.hex() / str(one.file)


def settle(storage: DiskStorage) -> None:
    """Return once everything that was requested so far is written and read."""
    for worker in (storage._writer, storage._reader):
        done = Event()
        worker.add(done.set)
        assert done.wait(60)
