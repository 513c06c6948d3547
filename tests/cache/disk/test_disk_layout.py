"""Pages of every format come back from their files bit for bit, in other places of other pools."""

import mlx.core as mx
import numpy as np
import pytest
from support.engines.disk_entries import digest
from support.processes.active_memory import active_memory

from mlxinfer.cache.base import AttentionSpec
from mlxinfer.cache.disk import layout as transfer
from mlxinfer.cache.disk.page_dir import PageDir
from mlxinfer.cache.disk.pagefile import Entry
from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.cache.store import LayerStore

SPECS = {0: AttentionSpec(2, 16, 24), 3: AttentionSpec(1, 40, 8), 4: AttentionSpec(3, 12, 20)}
"""The last one cannot be quantized."""
FORMATS = [KVFormat(), KVFormat(8, 8), KVFormat(4, 4), KVFormat(3, 5, first16=True), KVFormat(16, 6), KVFormat(2, 16, first16=True)]
CASES = [(kv, pages) for kv in FORMATS for pages in ([0], [2, 3, 4], [8, 1, 0], [~4], [~0]) if pages[0] >= 0 or kv.first16]


def bits(array: mx.array) -> np.ndarray:
    return np.array(array.view(mx.uint8))


def random_pool(pool: mx.array) -> mx.array:
    """Every pattern of bits, NaN and infinity among them."""
    shape = (*pool.shape[:-1], pool.shape[-1] * pool.dtype.size)
    return mx.random.randint(0, 256, shape).astype(mx.uint8).view(pool.dtype)


def stores(kv: KVFormat, dtype: mx.Dtype, *, random: bool) -> dict[int, LayerStore]:
    made = {layer: LayerStore(spec, dtype, kv) for layer, spec in SPECS.items()}
    for store in made.values():
        store.grow(pages=9, first=5)
        if random:
            store.sealed, store.first = ([random_pool(a) for a in pools] for pools in (store.sealed, store.first))
    mx.eval([store.arrays for store in made.values()])
    return made


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32], ids=str)
@pytest.mark.parametrize(("kv", "pages"), CASES, ids=str)
def test_round_trip(kv, dtype, pages, tmp_path):
    mx.random.seed(3)
    source, target = stores(kv, dtype, random=True), stores(kv, dtype, random=False)
    layout = transfer.page_layout(source, first=pages[0] < 0)
    folder = PageDir(tmp_path, 10**9)
    folder.prepare()
    read = np.empty((len(pages), layout.nbytes), np.uint8)
    for row, page in zip(read, pages, strict=True):
        one = Entry(digest(0), digest(page), digest(100), "full", tuple(range(64)), layout)
        folder.write(one, transfer.copy_page(list(source.values()), page, layout))
        assert folder.read(one, row)
    places = [~(2 + i) if page < 0 else (2 * i + 1) for i, page in enumerate(pages)]
    transfer.put_pages(list(target.values()), places, read, layout)
    for layer, store in source.items():
        for old, new in zip(*((s.first if pages[0] < 0 else s.sealed) for s in (store, target[layer])), strict=True):
            for page, place in zip(pages, places, strict=True):
                assert np.array_equal(bits(old[:, max(page, ~page)]), bits(new[:, max(place, ~place)]))
            others = [i for i in range(new.shape[1]) if i not in [max(p, ~p) for p in places]]
            assert not bits(new[:, mx.array(others)]).any()


def test_writing_in_place_goes_on_behind_a_copy():
    """A view that stays alive would have every later page copy its whole pool."""
    source = stores(KVFormat(), mx.bfloat16, random=True)
    layout = transfer.page_layout(source)
    data = transfer.copy_page(list(source.values()), 1, layout)
    mx.eval([s.arrays for s in source.values()])
    mx.clear_cache()
    before = active_memory()
    mx.reset_peak_memory()
    transfer.put_pages(list(source.values()), [4], data[None], layout)
    assert mx.get_peak_memory() - before < 3 * layout.nbytes
    assert np.array_equal(transfer.copy_page(list(source.values()), 4, layout), data)


def test_arrays_of_a_snapshot(tmp_path):
    arrays = {
        "open.0.0": mx.random.normal((3, 5, 7)).astype(mx.bfloat16),
        "open.0.1": mx.random.normal((3, 5, 1)).astype(mx.float16),
        "state.1.0": mx.random.normal((4, 3)),
        "empty": mx.zeros((0, 3), mx.float16),
    }
    layout = transfer.arrays_layout(arrays)
    found = transfer.arrays_from(transfer.copy_arrays(arrays, layout), layout)
    assert {n: (a.dtype, a.shape) for n, a in found.items()} == {n: (a.dtype, a.shape) for n, a in arrays.items()}
    for name, array in arrays.items():
        assert np.array_equal(bits(array), bits(found[name]))
