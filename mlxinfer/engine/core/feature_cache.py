"""Image features by digest: an LRU that is bounded in bytes."""

from __future__ import annotations

from collections import Counter

import mlx.core as mx

from ...models.towers.tower import Encoded


class FeatureCache:
    """Features of encoded images, each entry whole: the rows and all that is added to them in later layers.

    Entries are keyed by `ImageInput.digest`, not by request. Pinned entries stay, beyond the limit if necessary.
    """

    def __init__(self, limit: int) -> None:
        """`limit`: maximum bytes of entries that are not pinned; 0 keeps pinned ones only."""
        self.limit = limit
        self.nbytes = 0
        """Bytes of all entries."""
        self._entries: dict[bytes, Encoded] = {}
        """Least recently used first."""
        self._pins: Counter[bytes] = Counter()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, digest: bytes) -> Encoded:
        """Return an entry, which becomes the most recently used one. Raises `KeyError`."""
        found = self._entries[digest] = self._entries.pop(digest)
        return found

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the pinned entries."""
        return sum(_nbytes(self._entries[digest]) for digest in self._pins if digest in self._entries)

    def put(self, digest: bytes, encoded: Encoded) -> None:
        """Add evaluated features."""
        self.drop(digest)
        self._entries[digest] = encoded
        self.nbytes += _nbytes(encoded)
        self._trim()

    def drop(self, digest: bytes) -> None:
        """Remove an entry, if it exists."""
        if (old := self._entries.pop(digest, None)) is not None:
            self.nbytes -= _nbytes(old)

    def pin(self, digest: bytes) -> None:
        """Keep an entry, or one that is added later, until as many calls of `unpin`."""
        self._pins[digest] += 1

    def unpin(self, digest: bytes) -> None:
        """Undo a `pin`."""
        self._pins[digest] -= 1
        if not self._pins[digest]:
            del self._pins[digest]
            self._trim()

    def _trim(self) -> None:
        for digest in [digest for digest in self._entries if digest not in self._pins] if self.nbytes > self.limit else ():
            self.drop(digest)
            if self.nbytes <= self.limit:
                return


def _nbytes(encoded: Encoded) -> int:
    arrays: list[mx.array] = [encoded.features, *encoded.deepstack]
    return sum(array.nbytes for array in arrays)
