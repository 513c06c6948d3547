"""Converts pages and snapshots between the pools and the bytes of files."""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence
from hashlib import blake2b

import mlx.core as mx
import numpy as np

from ..pages import AttentionGroup
from ..prefix_tree import ITEM, Node, Snapshot
from ..state import RecurrentStore, Rows
from ..store import Filled, LayerStore
from .pagefile import DataLayout, Entry, Name, Tensor, shown

_STATE = "state"
_STATE_PART = re.compile(_STATE + "([0-9]{1,3})")


class CacheLayout:
    """Names, layouts and bytes of the files of one cache."""

    def __init__(self, groups: Sequence[AttentionGroup], stores: Mapping[int, LayerStore], recurrent: Mapping[int, RecurrentStore]) -> None:
        self._groups = groups
        self._stores = stores
        self._recurrent = recurrent
        self._of_group = [{layer: stores[layer] for layer in group.layers} for group in groups]
        self._pages = [page_layout(layers) for layers in self._of_group]
        self._firsts = [page_layout(of, first=True) if g.first else None for of, g in zip(self._of_group, groups, strict=True)]
        self.parts = ["full" if group.window is None else f"window{group.window}" for group in groups]
        """Names of the groups in file names, in order."""
        self._states: dict[int, DataLayout] = {}

    # --- pages

    def page_name(self, digest: bytes, parent: bytes, group: int) -> Name:
        """Return the file name of a page from the digests of its node and the parent."""
        return Name(shown(digest), shown(parent), self.parts[group])

    def page_bytes(self, depth: int, group: int) -> int:
        """Return the bytes of a page's data; first pages (`depth` 1) may have another format."""
        return self._page_layout(depth, group).nbytes

    def page(self, root: bytes, digests: tuple[bytes, bytes], block: bytes, depth: int, group: int) -> Entry:
        """Return the entry of a page; `digests` are of parent and node, `block` the node's tokens."""
        parent, digest = digests
        return Entry(root, digest, parent, self.parts[group], _tokens(block), self._page_layout(depth, group))

    def page_of(self, root: bytes, node: Node, group: int) -> Entry:
        """Return the entry of a node's page."""
        assert node.parent
        return self.page(root, (node.parent.digest, node.digest), node.block, node.depth, group)

    def group_of(self, entry: Entry) -> int | None:
        """Return the group of a page; None for a snapshot."""
        return None if entry.part.startswith(_STATE) else self.parts.index(entry.part)

    def copied_page(self, node: Node, group: int) -> np.ndarray:
        """Return a copy of a node's page, uint8 `[nbytes]`."""
        page = node.pages[group]
        assert page is not None
        return copy_page(list(self._of_group[group].values()), page, self._page_layout(node.depth, group))

    def put(self, group: int, pages: list[int], entries: Sequence[Entry], data: np.ndarray) -> None:
        """Store pages under these ids. No step may be in flight."""
        put_pages(list(self._of_group[group].values()), pages, data, entries[0].layout)

    def _page_layout(self, depth: int, group: int) -> DataLayout:
        first = self._firsts[group]
        return first if depth == 1 and first else self._pages[group]

    # --- snapshots

    def snapshot(self, root: bytes, node: bytes, tail: bytes) -> Entry:
        """Return the entry of a snapshot taken `tail` after the node with this digest."""
        name = snapshot_name(node, tail)
        count = len(tail) // ITEM
        return Entry(root, _snapshot_digest(node, tail), node, name.part, _tokens(tail), self._state_layout(count))

    def snapshot_of(self, root: bytes, snapshot: Snapshot) -> Entry:
        """Return the entry of an existing snapshot."""
        return self.snapshot(root, snapshot.node.digest, snapshot.tail)

    def copied_snapshot(self, snapshot: Snapshot) -> np.ndarray:
        """Return a copy of a snapshot's content, uint8 `[nbytes]`."""
        assert isinstance(snapshot.content, Rows)
        arrays = _named(snapshot.content)
        return copy_arrays(arrays, arrays_layout(arrays))

    def rows(self, entry: Entry, data: np.ndarray) -> Rows:
        """Return the content of a snapshot from its bytes, evaluated."""
        found: dict[str, dict[int, list[mx.array]]] = {"open": {}, _STATE: {}}
        for name, values in arrays_from(data, entry.layout).items():
            kind, layer, _ = name.split(".")
            found[kind].setdefault(int(layer), []).append(values)
        return Rows(found["open"], found[_STATE])

    def _state_layout(self, count: int) -> DataLayout:
        if count not in self._states:
            rows = {i: [mx.zeros((a.shape[1], count, a.shape[3]), a.dtype) for a in store.open] for i, store in self._stores.items()}
            states = {i: [mx.zeros((1, *shape), mx.float32) for shape in store.shapes] for i, store in self._recurrent.items()}
            self._states[count] = arrays_layout(_named(Rows(rows if count else {}, states)))
        return self._states[count]


def snapshot_name(node: bytes, tail: bytes) -> Name:
    """Return the file name of the snapshot taken `tail` after the node with this digest."""
    return Name(shown(_snapshot_digest(node, tail)), shown(node), f"{_STATE}{len(tail) // ITEM}")


def tail_length(name: Name) -> int | None:
    """Return the number of tokens in a snapshot's open page; None for a page."""
    found = _STATE_PART.fullmatch(name.part)
    return int(found[1]) if found else None


def _snapshot_digest(node: bytes, tail: bytes) -> bytes:
    return blake2b(node + tail, digest_size=32, person=b"snapshot").digest()


def _named(rows: Rows) -> dict[str, mx.array]:
    """Return a snapshot's arrays by `open.<layer>.<i>` and `state.<layer>.<i>`."""
    kinds = (("open", rows.open), (_STATE, rows.states))
    return {f"{kind}.{layer}.{i}": a for kind, by_layer in kinds for layer, arrays in by_layer.items() for i, a in enumerate(arrays)}


def _tokens(data: bytes) -> tuple[int, ...]:
    return tuple(array("q", data))


_NAMES = {mx.float32: "F32", mx.uint32: "U32", mx.float16: "F16", mx.bfloat16: "BF16"}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_HOST = {"F32": np.float32, "U32": np.uint32, "F16": np.float16, "BF16": np.uint16}
"""Numpy dtypes of the files' dtypes; numpy does not have bfloat16."""


def page_layout(layers: dict[int, LayerStore], *, first: bool = False) -> DataLayout:
    """Return the layout of a page in these layers, or in their pools of first pages: tensors `layers.<layer>.<i>`, `[Hkv, ...]` as in
    `LayerStore.sealed[i]`."""
    return DataLayout(
        [
            Tensor(f"layers.{layer}.{i}", _NAMES[pool.dtype], (pool.shape[0], *pool.shape[2:]))
            for layer, store in layers.items()
            for i, pool in enumerate(store.first if first else store.sealed)
        ]
    )


def arrays_layout(arrays: dict[str, mx.array]) -> DataLayout:
    """Return the layout of named arrays in this order."""
    return DataLayout([Tensor(name, _NAMES[array.dtype], tuple(array.shape)) for name, array in arrays.items()])


def copy_page(layers: Sequence[LayerStore], page: int, layout: DataLayout) -> np.ndarray:
    """Return the bytes of a page, uint8 `[layout.nbytes]`. The pools must be evaluated."""
    pools = [pool for store in layers for pool in (store.first if page < 0 else store.sealed)]
    place = ~page if page < 0 else page
    return _joined_bytes([memory[:, place] for memory in _host(pools)], layout)


def copy_arrays(arrays: dict[str, mx.array], layout: DataLayout) -> np.ndarray:
    """Return the bytes of the arrays, uint8 `[layout.nbytes]`."""
    return _joined_bytes(_host(list(arrays.values())), layout)


def put_pages(layers: Sequence[LayerStore], pages: list[int], data: np.ndarray, layout: DataLayout) -> None:
    """Store the pages of `data`, uint8 `[pages, layout.nbytes]`, under these ids, evaluated.

    The pools must be large enough, and no step may be in flight.
    """
    # Views of one array, into which bytes are copied once, and from there to the pools. All sizes are multiples of a word.
    words = mx.array(data.view(np.uint32))
    parts = [_part(words, start, tensor) for start, tensor in zip(layout.offsets, layout.tensors, strict=False)]
    for store in layers:
        count = len(store.first if pages[0] < 0 else store.sealed)
        taken, parts = parts[:count], parts[count:]
        if pages[0] < 0:
            store.seal(pages, Filled([a[:, :0] for a in store.sealed], taken))
        else:
            store.seal(pages, Filled(taken, []))
    mx.eval([a for store in layers for a in store.arrays])


def arrays_from(data: np.ndarray, layout: DataLayout) -> dict[str, mx.array]:
    """Return the arrays given to `copy_arrays`, evaluated."""
    found = {}
    for start, tensor in zip(layout.offsets, layout.tensors, strict=False):
        values = data[start : start + tensor.nbytes].view(_HOST[tensor.dtype]).reshape(tensor.shape)
        found[tensor.name] = mx.array(values).view(_DTYPES[tensor.dtype])
    mx.eval(list(found.values()))
    return found


def _host(arrays: Sequence[mx.array]) -> list[np.ndarray]:
    """Return views of the arrays' memory. While a view exists, MLX copies the array instead of writing in place."""
    viewed = [a.view(mx.uint16) if a.dtype == mx.bfloat16 else a for a in arrays]
    mx.eval(viewed)
    return [np.asarray(a) for a in viewed]


def _joined_bytes(arrays: Sequence[np.ndarray], layout: DataLayout) -> np.ndarray:
    data = np.empty(layout.nbytes, np.uint8)
    for source, start, tensor in zip(arrays, layout.offsets, layout.tensors, strict=False):
        data[start : start + tensor.nbytes].view(_HOST[tensor.dtype]).reshape(tensor.shape)[...] = source
    return data


def _part(words: mx.array, start: int, tensor: Tensor) -> mx.array:
    """Return a page's arrays with a page axis, `[Hkv, pages, ...]`."""
    part = words[:, start // 4 : (start + tensor.nbytes) // 4].view(_DTYPES[tensor.dtype])
    return mx.unflatten(part, 1, tensor.shape).swapaxes(0, 1)
