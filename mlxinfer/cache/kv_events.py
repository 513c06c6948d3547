"""What the prefix cache holds, told page by page as it changes: vLLM's KV events (https://docs.vllm.ai, "KV Events Subscriber").

A router that follows them from `AllBlocksCleared` on knows which prompts a worker would not have to read again. Without MLX.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Union

from ..util.dataclass import dataclass
from .prefix_tree import Node, PrefixIndex, Snapshot

GPU, DISK = "GPU", "DISK"
"""vLLM's media: memory that attention reads, whatever computes it, and files."""
_HASH_BYTES = 8


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A page can be reused from now on."""

    block_hash: int
    """The first 64 bits of the digest that covers this page's tokens and all before them."""
    parent_block_hash: int | None
    """That of the page before; None for a prompt's first page."""
    token_ids: tuple[int, ...]
    """The page's tokens, 64 of them."""
    medium: str
    """`GPU` or `DISK`."""
    group: int
    """Layers with the same window are a group, and have pages of their own. A page can be reused where all groups hold it; of a group with
    a window, the pages within that are enough."""
    salt: str
    """What the pages depend on besides their tokens, as a digest; empty for nothing."""


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """A page is gone."""

    block_hash: int
    """As in `BlockStored`."""
    medium: str
    """As in `BlockStored`."""
    group: int
    """As in `BlockStored`."""


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Nothing is held any more: the beginning, and whenever the cache starts empty again."""


KVEvent = Union[BlockStored, BlockRemoved, AllBlocksCleared]
KVEventSink = Callable[[KVEvent], None]
"""Takes events in their order, quickly, from any thread."""


def block_hash(digest: bytes) -> int:
    """An unsigned number of 64 bits, as vLLM sends them."""
    return int.from_bytes(digest[:_HASH_BYTES], "big")


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
        own, before, tokens = block_hash(node.digest), block_hash(parent.digest) if parent else None, tuple(array("i", node.block))
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
