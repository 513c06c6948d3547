"""Index of the prefix cache: a tree of filled pages, keyed by tokens. Without MLX.

The key of a text token is its id. The key of an image row is a number of 63 bits that depends on the pixels, above all ids
(`vision.inputs.ImageInput.keys`). "Tokens" in this package are such keys.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import field
from functools import partial
from hashlib import blake2b
from typing import Protocol

from ..util.dataclass import dataclass
from .pages import PAGE, AttentionGroup, PageAllocator

FORMAT_VERSION = 2
"""Version of the contents of pages and snapshots; other versions must not be used."""
ITEM = array("q").itemsize
BLOCK = PAGE * ITEM
"""Bytes of a page's keys."""


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Return tokens as int64 bytes in native order."""
    return array("q", tokens).tobytes()


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """A page of tokens that follows the pages of all its parents."""

    parent: Node | None
    """Parent; None for a root."""
    block: bytes
    """The page's tokens, int64; empty for a root."""
    digest: bytes
    """blake2b, 32 bytes, of the parent's digest and the tokens."""
    pages: list[int | None]
    """Page ids by group; None for a page that is not cached."""
    depth: int = 0
    """Number of pages up to this one."""
    children: dict[bytes, Node] = field(default_factory=dict)
    """Children by `block`."""
    snapshots: list[Snapshot] = field(default_factory=list)
    """Snapshots between this page's end and the next page's."""
    pins: int = 0
    """Number of running sequences that continue from this node."""

    @property
    def bare(self) -> bool:
        """True if nothing depends on this node."""
        return not (self.pins or self.children or self.snapshots) and all(page is None for page in self.pages)

    def chain(self) -> list[Node]:
        """Return the nodes from the root to this one, inclusive."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


@dataclass(slots=True, eq=False, repr=False)
class Snapshot:
    """A copy of a sequence's open page and recurrent states, taken `tail` tokens after a node."""

    node: Node
    """Node of the last full page."""
    tail: bytes
    """The open page's tokens, int64."""
    content: object
    """Copied arrays (`state.Rows`), opaque to the index."""
    nbytes: int
    used: bool = False
    """True if a sequence was resumed from the snapshot."""

    @property
    def position(self) -> int:
        """Number of tokens up to the snapshot."""
        return self.node.depth * PAGE + len(self.tail) // ITEM


class PrefixListener(Protocol):
    """Receives each change of a `PrefixIndex`, in order."""

    def page_stored(self, node: Node, group: int) -> None:
        """Handle a newly cached page of a group."""
        ...

    def page_removed(self, node: Node, group: int) -> None:
        """Handle an evicted page of a group."""
        ...

    def snapshot_stored(self, snapshot: Snapshot) -> None:
        """Handle a new snapshot."""
        ...


class PrefixIndex:
    """Nodes by tokens and by digest, the blake2b of the parent's digest and the tokens.

    A root's digest covers everything else on which pages depend. The index keeps unused pages until `PageAllocator` reclaims them, and
    snapshots up to `snapshot_bytes`, least recently used first. If a node loses its page in a layer without a window, its subtree is
    evicted.
    """

    def __init__(self, groups: Sequence[AttentionGroup], *, fingerprint: str, snapshot_bytes: int, exact: bool) -> None:
        """Create an index. With `exact`, snapshots have recurrent states and can only be resumed as a whole."""
        self.groups = groups
        self.exact = exact
        self.snapshot_bytes = snapshot_bytes
        self.snapshots: dict[Snapshot, None] = {}
        """Snapshots, least recently used first."""
        self.nbytes = 0
        self.version = 0
        """Counter of evictions."""
        self.listeners: list[PrefixListener] = []
        self._identity = fingerprint
        self._roots: dict[str, Node] = {}
        self._nodes: dict[bytes, Node] = {}
        self._owners: list[dict[int, Node]] = [{} for _ in groups]
        for number, group in enumerate(groups):
            for allocator in group.allocators:
                allocator.reclaim = partial(self._reclaim, number, allocator)

    # --- lookup

    def root_digest(self, cache_salt: str = "") -> bytes:
        """Return the digest of format version, fingerprint and salt."""
        return blake2b(repr((FORMAT_VERSION, PAGE, self._identity, cache_salt)).encode(), digest_size=32).digest()

    def digests(self, tokens: Sequence[int], cache_salt: str = "") -> Iterator[bytes]:
        """Yield the digests of the full pages of `tokens`, existing or not."""
        data, digest = token_bytes(tokens), self.root_digest(cache_salt)
        for start in range(0, len(data) - BLOCK + 1, BLOCK):
            digest = _digest(digest, data[start : start + BLOCK])
            yield digest

    def root(self, cache_salt: str = "") -> Node:
        """Return the root of a salt, created if missing; it stays while it has children, snapshots or pins."""
        if cache_salt not in self._roots:
            self._roots[cache_salt] = root = Node(None, b"", self.root_digest(cache_salt), [None] * len(self.groups))
            self._nodes[root.digest] = root
        return self._roots[cache_salt]

    def known_root(self, cache_salt: str = "") -> Node | None:
        return self._roots.get(cache_salt)

    @property
    def only_unsalted(self) -> bool:
        """True if the only root is the one without a salt."""
        return len(self._roots) == 1 and "" in self._roots

    def node(self, digest: bytes) -> Node | None:
        return self._nodes.get(digest)

    def nodes(self) -> Iterator[Node]:
        """Yield all nodes, parents before children."""
        waiting = list(self._roots.values())
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())

    # --- insertion

    def child(self, parent: Node, block: bytes) -> Node:
        """Return the child for these tokens, created without pages if missing."""
        assert len(block) == BLOCK
        node = parent.children.get(block)
        if node is None:
            node = Node(parent, block, _digest(parent.digest, block), [None] * len(self.groups), parent.depth + 1)
            parent.children[block] = self._nodes[node.digest] = node
        return node

    def put_page(self, node: Node, group: int, page: int) -> None:
        """Cache a newly sealed page of this node's tokens."""
        assert node.pages[group] is None
        allocator, place = self.groups[group].owner(page)
        allocator.keep(place)
        node.pages[group] = page
        self._owners[group][page] = node
        for listener in self.listeners:
            listener.page_stored(node, group)

    def covers(self, node: Node, tail: bytes) -> Snapshot | None:
        """Return an existing snapshot that makes one of these tokens redundant."""
        for kept in node.snapshots:
            if kept.tail == tail or (not self.exact and kept.tail.startswith(tail)):
                return kept
        return None

    def put_snapshot(self, node: Node, tail: bytes, content: object, nbytes: int) -> Snapshot | None:
        """Add a snapshot and evict others if necessary; None if it alone exceeds `snapshot_bytes`."""
        if nbytes > self.snapshot_bytes:
            return None
        if not self.exact:
            for shorter in [kept for kept in node.snapshots if tail.startswith(kept.tail)]:
                self._forget_snapshot(shorter)
        node.pins += 1
        while self.nbytes + nbytes > self.snapshot_bytes:
            self.drop_snapshot(next(iter(self.snapshots)))
        node.pins -= 1
        snapshot = Snapshot(node, tail, content, nbytes)
        node.snapshots.append(snapshot)
        self.snapshots[snapshot] = None
        self.nbytes += nbytes
        for listener in self.listeners:
            listener.snapshot_stored(snapshot)
        return snapshot

    def touch(self, snapshot: Snapshot) -> None:
        """Mark a snapshot as most recently used."""
        snapshot.used = True
        self.snapshots[snapshot] = self.snapshots.pop(snapshot)

    def refresh(self, node: Node) -> None:
        """Mark the pages up to this node as most recently used, and remove an empty node."""
        chain = node.chain()[::-1]
        for number, group in enumerate(self.groups):
            for page in (n.pages[number] for n in chain):
                if page is not None:
                    allocator, place = group.owner(page)
                    if place in allocator.idle:
                        allocator.idle[place] = allocator.idle.pop(place)
        self._prune(node)

    def pin(self, node: Node) -> None:
        """Prevent a node's removal until `unpin`."""
        node.pins += 1

    def unpin(self, node: Node) -> None:
        node.pins -= 1
        self._prune(node)

    # --- eviction

    def drop_snapshot(self, snapshot: Snapshot) -> None:
        """Evict a snapshot."""
        self._forget_snapshot(snapshot)
        self._prune(snapshot.node)

    def clear(self) -> None:
        """Evict everything without users."""
        for snapshot in list(self.snapshots):
            self.drop_snapshot(snapshot)
        for group in self.groups:
            for allocator in group.allocators:
                if allocator.idle and allocator.reclaim:
                    allocator.reclaim(len(allocator.idle))

    def close(self) -> None:
        """Drop all snapshots and the allocators' references, so that the memory does not wait for the garbage collector."""
        for snapshot in list(self.snapshots):
            self.drop_snapshot(snapshot)
        for group in self.groups:
            for allocator in group.allocators:
                allocator.reclaim = None

    def _reclaim(self, number: int, allocator: PageAllocator, count: int) -> None:
        group, left = self.groups[number], len(allocator.idle) - count
        while len(allocator.idle) > left:
            place = next(iter(allocator.idle))
            node = self._owners[number][place if allocator is group.allocator else ~place]
            if group.window is None:
                self._drop_all_behind(node)
            else:
                self._drop_page(node, number)
                self._prune(node)

    def _drop_all_behind(self, node: Node) -> None:
        found = [node]
        for gone in found:
            found.extend(gone.children.values())
        for gone in reversed(found):
            assert not gone.pins
            for snapshot in list(gone.snapshots):
                self._forget_snapshot(snapshot)
            for number in range(len(self.groups)):
                self._drop_page(gone, number)
            self._unlink(gone)
        if node.parent:
            self._prune(node.parent)

    def _drop_page(self, node: Node, number: int) -> None:
        page = node.pages[number]
        if page is not None:
            node.pages[number] = None
            del self._owners[number][page]
            allocator, place = self.groups[number].owner(page)
            allocator.forget(place)
            self.version += 1
            for listener in self.listeners:
                listener.page_removed(node, number)

    def _forget_snapshot(self, snapshot: Snapshot) -> None:
        del self.snapshots[snapshot]
        snapshot.node.snapshots.remove(snapshot)
        self.nbytes -= snapshot.nbytes
        self.version += 1

    def _prune(self, node: Node) -> None:
        """Remove this node and its parents while they are bare."""
        while node.bare:
            self._unlink(node)
            if node.parent is None:
                return
            node = node.parent

    def _unlink(self, node: Node) -> None:
        self._nodes.pop(node.digest, None)
        if node.parent is not None:
            node.parent.children.pop(node.block, None)
        else:
            for cache_salt in [a for a, root in self._roots.items() if root is node]:
                del self._roots[cache_salt]


def _digest(parent: bytes, block: bytes) -> bytes:
    return blake2b(parent + block, digest_size=32).digest()
