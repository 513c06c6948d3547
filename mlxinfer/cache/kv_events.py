"""What the prefix cache holds, told page by page as it changes: vLLM's KV events (https://docs.vllm.ai, "KV Events Subscriber").

A router that follows them from `AllBlocksCleared` on knows which prompts a worker would not have to read again. Without MLX.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Union

from ..util.dataclass import dataclass

if TYPE_CHECKING:
    from .prefix_tree import Node

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


def stored(node: Node, group: int, salt: str) -> BlockStored:
    """The event of a page in memory."""
    parent = node.parent if node.parent is not None and node.parent.parent is not None else None
    return BlockStored(
        block_hash(node.digest), block_hash(parent.digest) if parent else None, tuple(array("i", node.block)), GPU, group, salt
    )


def removed(node: Node, group: int) -> BlockRemoved:
    """The event of a page that memory no longer holds."""
    return BlockRemoved(block_hash(node.digest), GPU, group)
