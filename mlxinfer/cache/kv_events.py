"""vLLM's KV events for the prefix cache (https://docs.vllm.ai, "KV Events Subscriber"). Without MLX.

A router that follows the events from `AllBlocksCleared` knows which prompts a worker has cached.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from typing import Union

from ..util.dataclass import dataclass
from .prefix_tree import Node, PrefixIndex, Snapshot

GPU, DISK = "GPU", "DISK"
"""vLLM's media: memory that attention reads, on any device, and files."""
_HASH_BYTES = 8
_LARGEST_ID = 2**31 - 1


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A page is available for reuse."""

    block_hash: int
    """First 64 bits of the digest over this page's tokens and all before."""
    parent_block_hash: int | None
    """Hash of the previous page; None for a prompt's first page."""
    token_ids: tuple[int, ...]
    """The page's 64 tokens; see `published_ids` for image rows."""
    medium: str
    """`GPU` or `DISK`."""
    group: int
    """Group of layers with one window size, which has separate pages. Reuse needs the page in all groups; in a group with a window, only
    pages within the window."""
    salt: str
    """Digest of the cache salt; "" without one."""


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """A page was evicted."""

    block_hash: int
    medium: str
    group: int


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The cache is empty: at the start and after each reset."""


KVEvent = Union[BlockStored, BlockRemoved, AllBlocksCleared]
KVEventSink = Callable[[KVEvent], None]
"""Receives events in order from any thread, without blocking."""


def block_hash(digest: bytes) -> int:
    """Return the unsigned 64-bit number that vLLM sends."""
    return int.from_bytes(digest[:_HASH_BYTES], "big")


def published_ids(keys: Iterable[int]) -> tuple[int, ...]:
    """Return the token ids of a page's keys. An image row gets the lowest 31 bits of its key, because routers read ids of 32 bits."""
    return tuple([key if key <= _LARGEST_ID else key & _LARGEST_ID for key in keys])


class PrefixEvents:
    """Implements `PrefixListener`: reports the pages of a prefix index to a sink, the present ones first."""

    def __init__(self, index: PrefixIndex, sink: KVEventSink) -> None:
        self._index, self._sink = index, sink
        self._unsalted = index.root_digest()
        sink(AllBlocksCleared())
        for node in index.nodes():
            for group, page in enumerate(node.pages):
                if page is not None:
                    self.page_stored(node, group)

    def page_stored(self, node: Node, group: int) -> None:
        """Report a page in memory."""
        parent = node.parent if node.parent is not None and node.parent.parent is not None else None
        own, before, tokens = block_hash(node.digest), block_hash(parent.digest) if parent else None, published_ids(array("q", node.block))
        self._sink(BlockStored(own, before, tokens, GPU, group, self._salt(node)))

    def page_removed(self, node: Node, group: int) -> None:
        """Report an evicted page."""
        self._sink(BlockRemoved(block_hash(node.digest), GPU, group))

    def snapshot_stored(self, snapshot: Snapshot) -> None:
        """Ignore snapshots, which routers do not know."""

    def _salt(self, node: Node) -> str:
        if self._index.only_unsalted:
            return ""
        root = node.chain()[0]
        return "" if root.digest == self._unsalted else root.digest.hex()
