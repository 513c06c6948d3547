"""Pages between the pools of a group of layers and the bytes of files."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from ..store import Filled, LayerStore
from .pagefile import Layout, Tensor

_NAMES = {mx.float32: "F32", mx.uint32: "U32", mx.float16: "F16", mx.bfloat16: "BF16"}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_HOST = {"F32": np.float32, "U32": np.uint32, "F16": np.float16, "BF16": np.uint16}
"""As numpy has them: it knows no bfloat16."""


def page_layout(layers: dict[int, LayerStore], *, first: bool = False) -> Layout:
    """Of a page in these layers, or in their pools for first pages: `layers.<layer>.<i>`, `[Hkv, ...]` as in `LayerStore.sealed[i]`."""
    return Layout(
        [
            Tensor(f"layers.{layer}.{i}", _NAMES[pool.dtype], (pool.shape[0], *pool.shape[2:]))
            for layer, store in layers.items()
            for i, pool in enumerate(store.first if first else store.sealed)
        ]
    )


def arrays_layout(arrays: dict[str, mx.array]) -> Layout:
    return Layout([Tensor(name, _NAMES[array.dtype], tuple(array.shape)) for name, array in arrays.items()])


def copy_page(layers: Sequence[LayerStore], page: int, layout: Layout) -> np.ndarray:
    """The bytes of a page, uint8 `[layout.nbytes]`. The pools must have been evaluated."""
    pools = [pool for store in layers for pool in (store.first if page < 0 else store.sealed)]
    place = ~page if page < 0 else page
    return _joined([memory[:, place] for memory in _host(pools)], layout)


def copy_arrays(arrays: dict[str, mx.array], layout: Layout) -> np.ndarray:
    return _joined(_host(list(arrays.values())), layout)


def put_pages(layers: Sequence[LayerStore], pages: list[int], data: np.ndarray, layout: Layout) -> None:
    """Store the pages of `data`, uint8 `[pages, layout.nbytes]`, under these ids, for which there is room; evaluated. As for `seal`, no
    step may be in flight."""
    # Views of one array, so that bytes are copied to it once and from there to the pools. All sizes are multiples of a word.
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


def arrays_from(data: np.ndarray, layout: Layout) -> dict[str, mx.array]:
    """What `copy_arrays` was given, evaluated."""
    found = {}
    for start, tensor in zip(layout.offsets, layout.tensors, strict=False):
        values = data[start : start + tensor.nbytes].view(_HOST[tensor.dtype]).reshape(tensor.shape)
        found[tensor.name] = mx.array(values).view(_DTYPES[tensor.dtype])
    mx.eval(list(found.values()))
    return found


def _host(arrays: Sequence[mx.array]) -> list[np.ndarray]:
    """The arrays' own memory. Such views are not kept: as long as there is one, MLX would copy the array where it can write in place."""
    viewed = [a.view(mx.uint16) if a.dtype == mx.bfloat16 else a for a in arrays]
    mx.eval(viewed)
    return [np.asarray(a) for a in viewed]


def _joined(arrays: Sequence[np.ndarray], layout: Layout) -> np.ndarray:
    data = np.empty(layout.nbytes, np.uint8)
    for array, start, tensor in zip(arrays, layout.offsets, layout.tensors, strict=False):
        data[start : start + tensor.nbytes].view(_HOST[tensor.dtype]).reshape(tensor.shape)[...] = array
    return data


def _part(words: mx.array, start: int, tensor: Tensor) -> mx.array:
    """`[Hkv, pages, ...]`."""
    part = words[:, start // 4 : (start + tensor.nbytes) // 4].view(_DTYPES[tensor.dtype])
    return mx.unflatten(part, 1, tensor.shape).swapaxes(0, 1)
