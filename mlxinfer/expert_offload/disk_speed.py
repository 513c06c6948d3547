"""Measures the speed of a disk by reading pieces of a file past the system's cache."""

from __future__ import annotations

import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from time import perf_counter

from ..util.uncached_file import bypass_cache, drop_pages, whole_pages

_READS_AT_ONCE = 4
_ROUNDS = 3
_LEAST_PIECES = 16
"""Fewer pieces in a file say nothing about a disk."""


def read_speed(path: Path, piece: int, seconds: float = 0.6) -> float | None:
    """Return the bytes per second of reads of about `piece` bytes at random places of a file, several at once; None if unknown.

    The median of a few rounds, which last `seconds` together. Pages that the system has cached before may still serve a read on macOS.
    """
    piece = whole_pages(piece)
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        if not bypass_cache(descriptor):  # a file system without direct reads
            drop_pages(descriptor)
        count = os.fstat(descriptor).st_size // piece
        if count < _LEAST_PIECES:
            return None
        return _median_speed(descriptor, piece, count, seconds)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _median_speed(descriptor: int, piece: int, count: int, seconds: float) -> float:
    places = list(range(count))
    Random(0).shuffle(places)
    buffers = [mmap.mmap(-1, piece) for _ in range(_READS_AT_ONCE)]

    def read(reader: int, until: float) -> int:
        done = 0
        while places and perf_counter() < until:
            done += os.preadv(descriptor, [buffers[reader]], places.pop() * piece)
        return done

    speeds = []
    with ThreadPoolExecutor(_READS_AT_ONCE) as pool:
        for _ in range(_ROUNDS):
            start = perf_counter()
            until = start + seconds / _ROUNDS
            nbytes = sum(pool.map(lambda reader, until=until: read(reader, until), range(_READS_AT_ONCE)))  # type: ignore[misc]
            if nbytes:
                speeds.append(nbytes / (perf_counter() - start))
    for buffer in buffers:
        buffer.close()
    return sorted(speeds)[len(speeds) // 2]
