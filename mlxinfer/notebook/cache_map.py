"""Read-only view of the pages in a model's cache and their users."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..cache.kv_format import KVFormat
from ..cache.pages import PAGE, AttentionGroup
from ..cache.store import LayerStore
from ..errors import MLXInferError
from ..util.dataclass import dataclass
from ..util.words import counted
from .frames import frame
from .html import table

if TYPE_CHECKING:
    from ..cache.paged import PagedCache
    from ..cache.prefix_tree import Node
    from ..engine.core.engine import Engine
    from ..engine.core.sequence import Sequence
    from ..engine.llm import LLM


@dataclass(frozen=True, slots=True)
class CachePage:
    """A sealed page: 64 tokens in all layers with one window size."""

    page: int
    """Id in the group's pool; `~place` for a separate pool of first pages."""
    number: int
    """Index of the page in its sequence, from 0."""
    users: int
    """Number of running sequences that use the page; 0 for a page of the prefix cache only."""
    kept: bool
    """True if the prefix cache has the page."""
    token_ids: tuple[int, ...]
    """The page's 64 tokens; empty if the prefix cache does not have it."""
    nbytes: int
    """Bytes in all layers of the group."""

    @property
    def state(self) -> str:
        """State: "kept" without a user, "shared" with several, otherwise "sealed"."""
        return "kept" if not self.users else "shared" if self.users > 1 else "sealed"


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers with one window size, which share page ids."""

    window: int | None
    """Window in tokens; None for all."""
    layers: tuple[int, ...]
    """Indices of the layers."""
    formats: tuple[KVFormat, ...]
    """Format of each layer's sealed pages; 16 bits if its heads cannot be quantized."""
    capacity: int
    """Maximum number of pages."""
    open_bytes: int
    """Bytes of one open page in all layers of the group."""
    pages: tuple[CachePage, ...]
    """Present pages by number and id."""


@dataclass(frozen=True, slots=True)
class CachedSequence:
    """A running sequence."""

    slot: int
    """Slot in the cache."""
    tokens: int
    """Tokens with keys and values, including those being computed."""
    reused: int
    """Tokens reused from the prefix cache at the start."""
    first: tuple[int, ...]
    """Number of the first page per group; earlier ones have left the window."""
    pages: tuple[tuple[int, ...], ...]
    """Page ids per group, from `first`."""

    @property
    def open_tokens(self) -> int:
        """Tokens in the open page, which is neither quantized nor shared."""
        return self.tokens % PAGE


@dataclass(frozen=True, slots=True)
class CacheMap:
    """Contents of a KV cache at one moment."""

    groups: tuple[CacheGroup, ...]
    """One group per window size; empty for a model without native attention layers."""
    sequences: tuple[CachedSequence, ...]
    """Running sequences by slot."""
    snapshots: int
    """Number of open pages and recurrent states cached for reuse."""
    snapshot_bytes: int
    """Bytes of the snapshots."""

    @property
    def nbytes(self) -> int:
        """Bytes of sealed pages, open pages of running sequences and snapshots, without reserved memory."""
        sealed = sum(page.nbytes for group in self.groups for page in group.pages)
        return sealed + len(self.sequences) * sum(group.open_bytes for group in self.groups) + self.snapshot_bytes

    def to_pandas(self) -> Any:
        """Return a `pandas.DataFrame` with a row per sealed page. Raises `MLXInferError` without pandas."""
        return frame(self._rows())

    def _rows(self) -> list[dict[str, object]]:
        return [
            {
                "window": group.window,
                "page": page.page,
                "number": page.number,
                "state": page.state,
                "users": page.users,
                "kept": page.kept,
                "bytes": page.nbytes,
            }
            for group in self.groups
            for page in group.pages
        ]

    def _lines(self) -> Iterator[tuple[str, ...]]:
        for group in self.groups:
            states = [page.state for page in group.pages]
            names = sorted({form.name for form in group.formats})
            reach = "all tokens" if group.window is None else f"{group.window} tokens"
            counts = (str(states.count(state)) for state in ("sealed", "shared", "kept"))
            yield str(len(group.layers)), reach, " and ".join(names), *counts, str(group.capacity)

    def _repr_html_(self) -> str:
        return table(("layers", "see", "bits", "sealed", "shared", "kept only", "room"), self._lines())

    def __repr__(self) -> str:
        pages = sum(len(group.pages) for group in self.groups)
        running = counted(len(self.sequences), "running sequence")
        return f"CacheMap({counted(pages, 'sealed page')}, {running}, {self.nbytes / 1e6:.2f} MB)"


def engine_of(llm: LLM, asker: str) -> Engine:
    """Return the engine of a model for `asker`. Raises `MLXInferError` if it is closed, and for an `AsyncLLM`."""
    engine: Engine | None = getattr(llm, "engine", None)
    if engine is None:
        raise MLXInferError(f"{asker} needs an LLM: the engine of an AsyncLLM belongs to a thread of its own")
    return engine


def cache_map(llm: LLM) -> CacheMap:
    """Return the present contents of a model's cache, between two chunks of a stream or after an answer.

    Other threads must not use the model during the call. Raises `MLXInferError` if the model is closed, and for an `AsyncLLM`, whose engine
    belongs to another thread.
    """
    engine = engine_of(llm, "cache_map")
    pool = engine.cache.pool
    nodes = list(pool.index.nodes()) if pool.index else []
    running = sorted((s for s in engine.scheduler.running if s.slot is not None), key=lambda s: s.slot or 0)
    slots = [s.slot for s in running if s.slot is not None]
    groups = tuple(_group(engine.cache, index, nodes, slots, engine.kv) for index in range(len(pool.groups)))
    usage = pool.usage()
    return CacheMap(groups, tuple(_sequence(pool.groups, each) for each in running), usage.snapshots, usage.snapshot_bytes)


def _group(cache: PagedCache, index: int, nodes: list[Node], slots: list[int], kv: KVFormat) -> CacheGroup:
    """Return a group's pages, without finished sequences whose last step is still to be collected."""
    group, stores = cache.pool.groups[index], {id(store.spec): store for store, _ in cache.attention}
    held = [stores[id(cache.layers[layer])] for layer in group.layers]
    plain = sum(LayerStore.page_bytes(store.spec, store.dtype) for store in held)
    sealed = sum(LayerStore.page_bytes(store.spec, store.dtype, kv) for store in held)
    known = {page: node for node in nodes if (page := node.pages[index]) is not None}
    numbers, users = {page: node.depth - 1 for page, node in known.items()}, Counter[int]()
    for slot in slots:
        pages = group.tables[slot].pages
        users.update(pages)
        numbers.update((page, group.tables[slot].first + place) for place, page in enumerate(pages))
    found = []
    for page, number in sorted(numbers.items(), key=lambda item: (item[1], item[0])):
        nbytes = plain if group.first and page < 0 else sealed
        found.append(CachePage(page, number, users[page], page in known, _tokens(known.get(page)), nbytes))
    formats = tuple(store.format for store in held)
    return CacheGroup(group.window, tuple(group.layers), formats, group.allocator.capacity, plain, tuple(found))


def _tokens(node: Node | None) -> tuple[int, ...]:
    return tuple(array("q", node.block)) if node else ()


def _sequence(groups: list[AttentionGroup], sequence: Sequence) -> CachedSequence:
    assert sequence.slot is not None
    tables = [group.tables[sequence.slot] for group in groups]
    firsts, pages = tuple(held.first for held in tables), tuple(tuple(held.pages) for held in tables)
    return CachedSequence(sequence.slot, sequence.num_computed_tokens, sequence.reused_tokens, firsts, pages)
