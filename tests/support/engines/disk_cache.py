"""A tiny model over a cache whose pages go to disk and come back."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np

from mlxinfer.cache.base import Segment
from mlxinfer.cache.disk.storage import DiskStorage
from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.cache.paged import PagedCache

from ..models.tiny import random_tokens
from .tiny_engine import tiny_model

TOKENS = random_tokens(4000)


def files(directory: Path | None) -> list[Path]:
    return sorted(directory.rglob("*.safetensors")) if directory else []


class Reader:
    """Reads prompts; without a directory, from memory only. Counts what its disk does."""

    def __init__(
        self,
        name: str,
        directory: Path | None,
        kv: KVFormat,
        *,
        fingerprint: str = "",
        dtype: mx.Dtype = mx.float32,
        limit: int = 10**9,
        kv_cache_tokens: int = 1 << 13,
        prefix_cache_tokens: int = 1 << 13,
    ) -> None:
        self.model = tiny_model(name)
        self.tier = DiskStorage(directory, limit) if directory else None
        self.read_names: list[str] = []
        self.writes = 0
        if self.tier:
            self._count(self.tier)
        self.cache = PagedCache(
            self.model.layers,
            dtype=dtype,
            kv_cache_tokens=kv_cache_tokens,
            chunk=1000,
            kv=kv,
            fingerprint=fingerprint or name,
            prefix_cache_tokens=prefix_cache_tokens,
            snapshot_bytes=1 << 24,
            disk=self.tier,
        )
        self.past: dict[int, int] = {}
        self._tokens: dict[int, list[int]] = {}

    def _count(self, tier: DiskStorage) -> None:
        folder = tier._folder
        read, write = folder.read, folder.write

        def counted_read(entry, data):
            self.read_names.append(str(entry.file))
            return read(entry, data)

        def counted_write(entry, data):
            self.writes += 1
            return write(entry, data)

        folder.read, folder.write = counted_read, counted_write

    def open(self, tokens: list[int] | None = None) -> int:
        """With what there is of the tokens."""
        match = self.cache.find(tokens) if tokens else None
        slot = self.cache.open(match)
        self.past[slot] = match.reused if match else 0
        self._tokens[slot] = list(tokens[: match.reused]) if tokens and match else []
        return slot

    def prefetch(self, tokens: list[int], cache_salt: str = "") -> int:
        """Fetch the prefix and return the number of calls that took."""
        count = 0
        while self.cache.prefetch(tokens, cache_salt):
            self.cache.wait(10)
            count += 1
        return count

    def read(self, parts: list[tuple[int, list[int]]]) -> list[np.ndarray]:
        """Logits of the pieces of (slot, tokens) in one step."""
        segments, start = [], 0
        for slot, tokens in parts:
            segments.append(Segment(slot, start, len(tokens), self.past[slot], len(TOKENS)))
            self.past[slot] += len(tokens)
            self._tokens[slot] += tokens
            start += len(tokens)
        step = self.cache.begin(segments)
        logits = self.model.logits(self.model.hidden(mx.array([t for _, tokens in parts for t in tokens], mx.int32), step))
        mx.eval(logits, step.state)
        if step.needs_commit:
            self.cache.commit(step, self._tokens)
        return [np.array(logits[s.start : s.start + s.count]) for s in segments]

    def flush(self) -> None:
        """Have all written that was noticed so far."""
        while self.cache.tidy():
            pass
        while self.tier and self.tier._writing and not self.tier.off:
            pass

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self.cache.close(60)
