"""Slots and pages of all running sequences and the prefix cache, without arrays and MLX."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import field

from ..util.dataclass import dataclass
from .pages import PAGE, AttentionGroup, PageTable, pages_for
from .prefix_match import Match, Ranges, find
from .prefix_tree import Node, PrefixIndex, Snapshot, token_bytes

Places = list["int | None"]
"""Page ids for newly filled pages; None for a page that is stored already."""


@dataclass(frozen=True, slots=True)
class PageDemand:
    """One sequence's demand in the next step."""

    slot: int | None
    """PoolSlot; None for a sequence that is not open."""
    past: int
    """Computed tokens; without slot and match, pages for these are also needed."""
    count: int
    match: Match | None = None
    """Result of `find` for a sequence that is not open."""


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """Pages in layers without a window (or in the first group if all have one), and snapshots."""

    pages: int = 0
    """Capacity, in pages."""
    used: int = 0
    """Pages used by running sequences."""
    cached: int = 0
    """Pages of the prefix cache without users."""
    snapshots: int = 0
    snapshot_bytes: int = 0


@dataclass(slots=True)
class PoolSlot:
    """State of a running sequence for the prefix cache."""

    head: Node | None = None
    """Node of the last full page; None if pages do not enter the prefix cache."""
    stations: list[Snapshot] = field(default_factory=list)
    """Snapshots taken during prefill."""


class PagePool:
    """Pages of each running sequence and of the prefix cache.

    Sequences share only sealed pages: after `fork`, when `open` reuses pages, and when two fill a page with the same tokens after the same
    prefix.
    """

    def __init__(
        self,
        windows: Iterable[int | None],
        *,
        kv_cache_tokens: int,
        chunk: int,
        first: bool = False,
        fingerprint: str = "",
        prefix_cache_tokens: int = 0,
        snapshot_bytes: int = 0,
        exact: bool = False,
    ) -> None:
        """Create a pool. `kv_cache_tokens` bounds each group, `prefix_cache_tokens` its pages without users.

        With `first`, first pages have a separate pool. If `prefix_cache_tokens` and `snapshot_bytes` are both 0, nothing is reused.
        """
        capacity = max(kv_cache_tokens // PAGE, 1)
        most_idle = min(prefix_cache_tokens // PAGE, capacity)
        self.chunk = chunk
        self.groups = [AttentionGroup(w, capacity, first=first, most_idle=most_idle) for w in dict.fromkeys(windows)]
        self.index: PrefixIndex | None = None
        if prefix_cache_tokens or snapshot_bytes:
            self.index = PrefixIndex(self.groups, fingerprint=fingerprint, snapshot_bytes=snapshot_bytes, exact=exact)
        self.slots: dict[int, PoolSlot] = {}
        self._free_slots: list[int] = []
        self._last_slots = 0

    @property
    def slot_count(self) -> int:
        """Highest slot ever assigned plus one."""
        return self._last_slots

    # --- queries

    def find(self, tokens: Sequence[int], cache_salt: str = "", spans: Ranges = ()) -> Match:
        """Return the cached prefix of `tokens`, which divides none of `spans`. Pages also depend on `cache_salt`."""
        if self.index is None:
            return Match(0, "nothing is kept for reuse", cache_salt)
        return find(self.index, tokens, cache_salt, spans)

    def fits(self, tokens: int) -> bool:
        """Return True if a sequence of `tokens` tokens fits in an otherwise empty pool."""
        return all(pages_for(tokens, g.window, self.chunk) <= g.allocator.capacity for g in self.groups)

    def room(self, growth: Sequence[PageDemand]) -> bool:
        """Return True if one step can get pages for all of these, free or evictable."""
        return all(self._has_room(number, growth) for number in range(len(self.groups)))

    def _has_room(self, number: int, growth: Sequence[PageDemand]) -> bool:
        group, wanted, first = self.groups[number], 0, 0
        for g in growth:
            filled = (g.past + g.count) // PAGE - g.past // PAGE
            if g.slot is None and g.match is not None:
                pages = g.match.tables[number][1] if g.match.tables else ()
                idle = [group.owner(page)[0] for page in pages if not _in_use(group, page)]
                filled += sum(allocator is group.allocator for allocator in idle)
                first += sum(allocator is group.first for allocator in idle)
            elif g.slot is None:
                filled += g.past // PAGE
            if group.first and g.past < PAGE <= g.past + g.count:
                first += 1
                filled -= 1
            wanted += filled
        return wanted <= group.allocator.available and (group.first is None or first <= group.first.available)

    def usage(self) -> PoolUsage:
        group = next((g for g in self.groups if g.window is None), self.groups[0] if self.groups else None)
        allocators = group.allocators if group else []
        index = self.index
        return PoolUsage(
            pages=group.allocator.capacity if group else 0,
            used=sum(a.used for a in allocators),
            cached=sum(len(a.idle) for a in allocators),
            snapshots=len(index.snapshots) if index else 0,
            snapshot_bytes=index.nbytes if index else 0,
        )

    # --- slots

    def open(self, match: Match | None = None, cache_salt: str | None = "") -> int:
        """Return a slot for a sequence with `match.reused` tokens. With `cache_salt` None, its pages do not enter the prefix cache."""
        slot = self._take_slot()
        head = None
        if self.index and match and match.node:
            assert match.version == self.index.version, "the cache has changed since it was searched"
            head = match.node
            if match.snapshot:
                self.index.touch(match.snapshot)
        elif self.index and cache_salt is not None:
            head = self.index.root(match.cache_salt if match else cache_salt)
        if self.index and head:
            self.index.pin(head)
        self.slots[slot] = PoolSlot(head)
        tables = match.tables if match else ()
        for number, group in enumerate(self.groups):
            first, pages = tables[number] if tables else (0, ())
            group.share(pages)
            group.tables[slot] = PageTable(first, list(pages))
        return slot

    def fork(self, slot: int) -> int:
        """Return a new slot with the same past."""
        new = self._take_slot()
        head = self.slots[slot].head
        if self.index and head:
            self.index.pin(head)
        self.slots[new] = PoolSlot(head)
        for group in self.groups:
            table = group.tables[slot]
            group.share(table.pages)
            group.tables[new] = PageTable(table.first, list(table.pages))
        return new

    def release(self, slot: int) -> None:
        """Free the slot; pages in the prefix cache stay until they are evicted."""
        self._leave_index(slot)
        for group in self.groups:
            # The last page becomes idle first, because a page is useless without the pages before it.
            group.release(group.tables.pop(slot).pages[::-1])
        del self.slots[slot]
        self._free_slots.append(slot)

    def _take_slot(self) -> int:
        if self._free_slots:
            return self._free_slots.pop()
        self._last_slots += 1
        return self._last_slots - 1

    # --- growth

    def seal(self, slot: int, past: int, count: int, tokens: Sequence[int] | None) -> list[Places]:
        """Allocate the pages that a sequence filled and return their places by group.

        `tokens` are the sequence's tokens, at least up to these pages. After None, no further pages of the sequence enter the prefix cache.
        """
        start, filled = past // PAGE, (past + count) // PAGE - past // PAGE
        nodes = self._nodes(slot, start, filled, tokens)
        known: list[Places] = [[n.pages[i] for n in nodes] if nodes else [None] * filled for i in range(len(self.groups))]
        for group, pages in zip(self.groups, known, strict=True):
            group.share([page for page in pages if page is not None])
        return [self._seal(number, slot, nodes, pages) for number, pages in enumerate(known)]

    def _seal(self, number: int, slot: int, nodes: list[Node], known: Places) -> Places:
        group, table = self.groups[number], self.groups[number].tables[slot]
        missing = [i for i, page in enumerate(known) if page is None]
        places: Places = [None] * len(known)
        if missing:
            new = group.allocate(table.end // PAGE + missing[0], len(missing))
            for i, page in zip(missing, new, strict=True):
                places[i] = page
                if nodes and self.index:
                    self.index.put_page(nodes[i], number, page)
        table.pages += [page for pair in zip(known, places, strict=True) for page in pair if page is not None]
        return places

    def _nodes(self, slot: int, start: int, count: int, tokens: Sequence[int] | None) -> list[Node]:
        """Return the nodes of newly filled pages and advance the slot's head; empty if pages are not cached."""
        head = self.slots[slot].head
        if self.index is None or head is None:
            return []
        if tokens is None or head.depth != start:
            self._leave_index(slot)
            return []
        nodes = []
        for page in range(start, start + count):
            head = self.index.child(head, token_bytes(tokens[page * PAGE : (page + 1) * PAGE]))
            nodes.append(head)
        self.index.pin(head)
        self._leave_index(slot)
        self.slots[slot].head = head
        return nodes

    def _leave_index(self, slot: int) -> None:
        head, self.slots[slot].head = self.slots[slot].head, None
        if self.index and head:
            self.index.unpin(head)

    def leave_behind(self, slot: int, position: int) -> None:
        """Free pages outside the window of a sequence whose next token is at `position`."""
        for group in self.groups:
            if group.window is not None:
                group.release(group.tables[slot].drop_before(position - group.window + 1))

    def head(self, slot: int, tokens: Sequence[int]) -> Node | None:
        """Return the node for a snapshot after these tokens; None if the sequence is not cached."""
        head = self.slots[slot].head
        if head is None or self.index is None or not tokens:
            return None
        if not self.groups and head.depth < len(tokens) // PAGE:
            # Without attention layers `seal` is never called, so the nodes of full pages are missing.
            self._nodes(slot, head.depth, len(tokens) // PAGE - head.depth, tokens)
            head = self.slots[slot].head
        return head if head and head.depth == len(tokens) // PAGE else None

    def keep(self, slot: int, tokens: Sequence[int], take: Callable[[int], tuple[object, int]]) -> Snapshot | None:
        """Snapshot a slot after exactly `tokens`; None if an existing snapshot covers it.

        `take(n)` copies n tokens of the open page and the states, and returns (copy, bytes).
        """
        head = self.head(slot, tokens)
        if head is None or self.index is None or not self.index.snapshot_bytes:
            return None
        tail = token_bytes(tokens[head.depth * PAGE :])
        if not tail and not self.index.exact:
            return None
        there = self.index.covers(head, tail)
        if there:
            self.index.touch(there)
            return None
        return self.index.put_snapshot(head, tail, *take(len(tokens) % PAGE))

    def keep_on_the_way(self, slot: int, tokens: Sequence[int], take: Callable[[int], tuple[object, int]]) -> Snapshot | None:
        """Snapshot a sequence during prefill.

        Only the oldest snapshot within each doubling of the distance is kept, so that one long prompt does not evict all others.
        """
        kept = self.keep(slot, tokens, take)
        if kept is not None and self.index:
            seen, left = set(), []
            for old in [*self.slots[slot].stations, kept]:
                distance = (len(tokens) - old.position).bit_length()
                if old not in self.index.snapshots or old.used:
                    continue
                if distance in seen:
                    self.index.drop_snapshot(old)
                else:
                    seen.add(distance)
                    left.append(old)
            self.slots[slot].stations = left
        return kept


def _in_use(group: AttentionGroup, page: int) -> bool:
    allocator, place = group.owner(page)
    return allocator.in_use(place)
