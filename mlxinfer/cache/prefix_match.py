"""Search for the cached prefix of a prompt, and the reason for its end. Without MLX."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..util.dataclass import dataclass
from .pages import PAGE
from .prefix_tree import BLOCK, ITEM, Node, PrefixIndex, Snapshot, token_bytes


@dataclass(frozen=True, slots=True)
class Match:
    """A cached prefix for `open`, valid until the cache changes."""

    reused: int = 0
    """Number of cached tokens."""
    note: str = ""
    """Reason for the end of the prefix, for the user."""
    cache_salt: str = ""
    node: Node | None = None
    """Node of the last full page."""
    snapshot: Snapshot | None = None
    """Snapshot with open page and recurrent states, if needed."""
    tables: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """Per group: (number of the first needed page, page ids from there)."""
    version: int = 0
    """`PrefixIndex.version` at the search."""


Ranges = Sequence[tuple[int, int]]
"""Index ranges [first, end), ascending."""


def find(index: PrefixIndex, tokens: Sequence[int], cache_salt: str = "", spans: Ranges = ()) -> Match:
    """Return the longest cached prefix of `tokens`, never all of them, from which a sequence can continue.

    It ends outside or at the start of each of `spans`, whose tokens see one another.
    """
    data, limit = token_bytes(tokens), len(tokens) - 1
    root = index.known_root(cache_salt)
    if root is None or limit < 1:
        return Match(0, "nothing cached begins like this" if limit > 0 else "", cache_salt)
    path = _Path(index, root, data, spans)
    lost = ""
    best: tuple[int, int, Snapshot | None] = 0, 0, None
    for found in path.positions(limit):
        if path.complete(*found[:2]):
            best = found
            break
        lost = lost or f"pages of the window before token {found[0]} are gone"
    position, depth, snapshot = best
    note = path.note(position, limit, lost)
    return Match(position, note, cache_salt, path.nodes[depth], snapshot, path.tables(position, depth), index.version)


class _Path:
    """Nodes that match a prompt."""

    def __init__(self, index: PrefixIndex, root: Node, data: bytes, spans: Ranges) -> None:
        self._index = index
        self._data = data
        self._spans = spans
        self.nodes = [root]
        runs = [0] * len(index.groups)
        self._runs = [runs]
        """Number of consecutive cached pages up to each node, per group."""
        for start in range(0, len(data) - BLOCK + 1, BLOCK):
            node = self.nodes[-1].children.get(data[start : start + BLOCK])
            if node is None:
                break
            runs = [0 if page is None else run + 1 for page, run in zip(node.pages, runs, strict=True)]
            self.nodes.append(node)
            self._runs.append(runs)

    def positions(self, limit: int) -> Iterator[tuple[int, int, Snapshot | None]]:
        """Yield candidate points to resume, longest first, before pages are checked: (position, depth, snapshot)."""
        for depth in range(len(self.nodes) - 1, -1, -1):
            start = depth * PAGE
            found: list[tuple[int, int, Snapshot | None]] = []
            for snapshot in self.nodes[depth].snapshots:
                same = _common(snapshot.tail, self._rest(depth))
                position = self._outside_spans(min(start + same, limit))
                whole = position == snapshot.position
                if position >= start and (whole if self._index.exact else position > start):
                    found.append((position, depth, snapshot))
            if found:
                yield from sorted(found, key=lambda f: -f[0])
            if start <= limit and not self._index.exact and depth and self._outside_spans(start) == start:
                yield start, depth, None

    def _outside_spans(self, position: int) -> int:
        """Return the position, or the start of the span that it would divide."""
        return next((first for first, end in self._spans if first < position < end), position)

    def complete(self, position: int, depth: int) -> bool:
        """Return True if all pages are cached that resuming at a position needs."""
        groups, runs = self._index.groups, self._runs[depth]
        return all(run >= depth - group.oldest(position) for group, run in zip(groups, runs, strict=True))

    def tables(self, position: int, depth: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Return `Match.tables` for resuming at a position."""
        found = []
        for number, group in enumerate(self._index.groups):
            first = min(group.oldest(position), depth)
            pages = [node.pages[number] for node in self.nodes[first + 1 : depth + 1]]
            found.append((first, tuple(page for page in pages if page is not None)))
        return tuple(found)

    def note(self, reused: int, limit: int, lost: str) -> str:
        """Return `Match.note`: the reason why only `reused` of `limit` tokens are cached."""
        known, differs = self._known()
        reason = ""
        if known < limit:
            reason = f"diverged at token {known}" if differs else f"nothing cached beyond token {known}"
        if not known:
            reason = "nothing cached begins like this"
        if reused < min(known, limit) and not lost and self._index.exact:
            lost = f"the last state kept is that at token {reused}" if reused else "no state of it is kept"
        return ", ".join(part for part in (reason, lost) if part)

    def _known(self) -> tuple[int, bool]:
        """Return (tokens that match a cached sequence, True if that sequence continues differently)."""
        depth, rest = len(self.nodes) - 1, self._rest(len(self.nodes) - 1)
        others = [*self.nodes[-1].children, *(snapshot.tail for snapshot in self.nodes[-1].snapshots)]
        best, differs = 0, False
        for other in others:
            same = _common(other, rest)
            if same >= best:
                differs = (differs and same == best) or len(other) > same * ITEM
                best = same
        return depth * PAGE + best, differs

    def _rest(self, depth: int) -> bytes:
        return self._data[depth * BLOCK : (depth + 1) * BLOCK]


def _common(one: bytes, two: bytes) -> int:
    """Return the number of tokens in the common prefix."""
    size = min(len(one), len(two))
    if one[:size] == two[:size]:
        return size // ITEM
    for start in range(0, size, ITEM):
        if one[start : start + ITEM] != two[start : start + ITEM]:
            return start // ITEM
    return size // ITEM
