"""Decode plans: refused arguments, division of the work, and threadgroup memory of tiles."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxinfer.errors import UnsupportedShapeError
from mlxinfer.kernels_metal import emulator
from mlxinfer.kernels_metal.executors import get_kernel, run_with
from mlxinfer.kernels_metal.paged_attention.launcher import paged_attention_decode
from mlxinfer.kernels_metal.paged_attention.plan import DecodePlan, Pools, SegmentRows, plan_decode
from mlxinfer.kernels_metal.paged_attention.reference import attention_over_pages
from mlxinfer.kernels_metal.paged_attention.tiles import (
    DIMS,
    THREADGROUP_BYTES,
    Shape,
    check_shape,
    decode_memory,
    decode_tile,
    row_classes,
)
from tests.support.kernels.emulated import emulated, needs_emulator
from tests.support.oracles.decode_scenes import Scene, largest
from tests.support.oracles.sealed_pages import to_float

SHAPE = Shape(mx.float16, 8, 2, 64, 64, 4, 4)
POOLS = Pools(pages=10, first_pages=1, slots=3)
GOOD = SegmentRows(slot=1, start=0, count=2, past=200, pages=[~0, 4, 9])


def plan(rows: SegmentRows = GOOD, shape: Shape = SHAPE, window: int | None = None) -> DecodePlan:
    return plan_decode(shape, [rows], POOLS, query_rows=2, window=window, cores=10)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": 0}, "0 rows"),
        ({"count": 9, "past": 128, "pages": [1, 2]}, "9 rows"),
        ({"start": 1}, "rows 1 to 3 of 2 queries"),
        ({"start": -1}, "rows -1"),
        ({"past": 255}, "one page"),
        ({"past": -1}, "one page|tokens -1"),
        ({"slot": 3}, "slot 3 of 3"),
        ({"slot": -1}, "slot -1"),
        ({"pages": [1, 2]}, "3 sealed pages; page ids were given for 2"),
        ({"pages": [1, 2, 3, 4]}, "page ids were given for 4"),
        ({"pages": []}, "page ids were given for 0"),
        ({"pages": [1, 2, 10]}, "page id 10"),
        ({"pages": [~1, 2, 3]}, "page id -2"),
        ({"first": 1, "pages": [1, 2]}, "page 0 is within the window"),
        ({"first": -1, "pages": [1, 2, 3, 4]}, "from page -1"),
        ({"kept": 9}, "1 rows after 9 kept ones are not in entry 0 of 0"),
    ],
)
def test_rows_and_pages_that_cannot_be_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(replace(GOOD, **change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k_bits": 7}, "16, 8, 6, 5, 4, 3, 2"),
        ({"v_bits": 1}, "16, 8, 6, 5, 4, 3, 2"),
        ({"key_dim": 60}, "multiples of 8 from 16 to 512"),
        ({"value_dim": 576}, "multiples of 8 from 16 to 512"),
        ({"heads": 34}, "1 to 16"),
        ({"heads": 9}, "9 heads to 2"),
        ({"dtype": mx.int32}, "float32, float16 and bfloat16"),
    ],
)
def test_shapes_without_a_kernel_are_refused_with_what_there_is(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedShapeError, match=message):
        plan(shape=replace(SHAPE, **change))


def test_no_rows_and_no_window_are_refused() -> None:
    with pytest.raises(ValueError, match="no rows"):
        plan_decode(SHAPE, [], POOLS, query_rows=2)
    with pytest.raises(ValueError, match="window of 0"):
        plan(window=0)


def test_pages_before_the_window_need_no_ids() -> None:
    assert plan(replace(GOOD, first=2, pages=[9]), window=70).items == 1
    with pytest.raises(ValueError, match="page 1 is within the window"):
        plan(replace(GOOD, first=2, pages=[9]), window=100)


def test_arrays_that_do_not_fit_the_plan_are_refused() -> None:
    s = Scene(((1, 300), (2, 70)), dim=64, heads=2, first=True, sinks=True)
    sealed, first, opened = s.arrays
    good: dict[str, Any] = {"q": s.q, "sealed": sealed, "first": first, "open_pages": opened, "plan": s.plan, "sinks": s.sink_logits}
    for change, message in [
        ({"q": s.q[:2]}, "queries are float32"),
        ({"q": s.q.astype(mx.float16)}, "queries are float16"),
        ({"sealed": sealed[:3]}, "sealed pages are"),
        ({"sealed": [sealed[0][:, :3], *sealed[1:]]}, "sealed pages are"),
        ({"sealed": [a[:, :, :32] for a in sealed]}, "sealed pages are"),
        ({"first": []}, "first pages are none"),
        ({"first": [first[0], first[1][:, :, :63]]}, "first pages are"),
        ({"open_pages": [opened[0][:1], opened[1]]}, "open pages are"),
        ({"recent": opened}, "recent rows are"),
        ({"sinks": s.q[0, 0, :3]}, "sinks"),
        ({"sinks": mx.zeros((4,), mx.int32)}, "sinks"),
    ]:
        with pytest.raises(ValueError, match=message):
            paged_attention_decode(scale=1.0, **{**good, **change})


def test_work_items_cover_all_pages_once() -> None:
    rows = [SegmentRows(0, 0, 2, 64 * 50 + 3, list(range(50))), SegmentRows(1, 2, 1, 5, []), SegmentRows(2, 3, 1, 64 * 9, list(range(9)))]
    p = plan_decode(SHAPE, rows, Pools(50, 0, 3), query_rows=4, cores=10)
    work = np.array(p.work).reshape(-1, 11)
    for i, r in enumerate(rows):
        pages = [page for item in work if item[0] == i for page in range(item[5], item[6])]
        assert pages == list(range(r.past // 64 + 1))
    assert p.parts is not None
    parts = np.array(p.parts).reshape(-1, 3)[: p.rows]
    used = [first + i * stride for first, number, stride in parts for i in range(number)]
    assert sorted(used) == list(range(p.part_rows))


def test_longer_sequences_and_more_cores_make_more_items() -> None:
    def items(pages: int, cores: int, batch: int = 1) -> int:
        rows = [SegmentRows(i, i, 1, 64 * pages, list(range(pages))) for i in range(batch)]
        return plan_decode(SHAPE, rows, Pools(pages, 0, batch), query_rows=batch, cores=cores).items

    assert items(3, 40) == 1
    assert items(500, 10) < items(500, 40)
    assert items(2000, 40) == pytest.approx(8 * 40 / 2, rel=0.1)
    assert items(500, 10, batch=40) <= 2 * 40


@pytest.mark.parametrize(
    "shape", [Shape(mx.float16, 32, 8, 128, 128, 4, 4), Shape(mx.float16, 8, 1, 64, 64, 16, 16)], ids=["own", "shared"]
)
@pytest.mark.parametrize("cores", [10, 20, 40, 80])
def test_short_contexts_give_every_core_something(shape: Shape, cores: int) -> None:
    """Two threadgroups per core, or as many as pages allow: a page per simdgroup, or two pages if simdgroups share them. Up to four pages
    are not divided."""
    rows = 1 if shape.group == 4 else 2
    for pages in range(1, 60):
        least = 2 if decode_tile(shape, rows).shared and pages > 4 else 4
        own = SegmentRows(0, 0, rows, 64 * pages - 60, list(range(pages - 1)))
        p = plan_decode(shape, [own], Pools(60, 0, 1), query_rows=rows, cores=cores)
        groups = p.items * shape.kv_heads
        assert groups >= min(2 * cores, -(-pages // least) * shape.kv_heads)
        assert p.items == 1 or pages / p.items > least / 2


def test_many_short_sequences_are_not_cut() -> None:
    rows = [SegmentRows(i, i, 1, 64 * 7, list(range(7))) for i in range(16)]
    assert plan_decode(SHAPE, rows, Pools(7, 0, 16), query_rows=16, cores=10).parts is None


def test_rows_that_no_kernel_takes_at_once_are_divided() -> None:
    shape = replace(SHAPE, heads=16, kv_heads=1)
    p = plan_decode(shape, [SegmentRows(0, 0, 7, 200, [2, 5, 1]), SegmentRows(1, 7, 1, 70, [3])], Pools(6, 0, 2), query_rows=8, cores=1)
    work = np.array(p.work).reshape(-1, 11)[: p.items]
    assert [tuple(item[:4]) for item in work] == [(0, 0, 2, 200), (0, 2, 2, 202), (0, 4, 2, 204), (0, 6, 1, 206), (1, 7, 1, 70)]
    assert {item[7] for item in work[:4]} == {0}
    assert work[4][7] == 3
    assert list(work[:, 8]) == [0, 2, 4, 6, 7]


def test_every_tile_fits_into_threadgroup_memory() -> None:
    heads, bits, kinds = (1, 2, 3, 5, 7, 8, 16), ((16, 16), (8, 3), (4, 4), (2, 2), (3, 16), (16, 5)), (mx.float32, mx.float16)
    sizes = [*((dim, dim) for dim in DIMS), *((dim, DIMS[-1]) for dim in DIMS[::7]), *((DIMS[-1], dim) for dim in DIMS[::3])]
    for i, ((dim, value_dim), group, (k, v)) in enumerate(itertools.product(sizes, heads, bits)):
        shape = Shape(kinds[i % 2], group, 1, dim, value_dim, k, v)
        check_shape(shape)
        classes = row_classes(shape)
        assert classes[0] == 1
        assert len(classes) <= 3
        for rows in classes:
            tile = decode_tile(shape, rows)
            assert decode_memory(shape, tile) <= THREADGROUP_BYTES
            assert tile.queries * (tile.simdgroups if tile.shared else 1) >= group * rows
            assert 32 * tile.simdgroups <= 256


@needs_emulator
@pytest.mark.parametrize("heads", [2, 12])
def test_the_parameters_are_those_that_mlx_declares(heads: int) -> None:
    """With small arrays, which Metal gets in another address space, and large ones."""
    s = Scene(((1, 1200),), dim=64, heads=heads, kv_heads=1, sinks=True, cores=100)
    calls: list[tuple[emulator.Kernel, dict[str, Any]]] = []

    def recording(**names: Any) -> Any:
        kernel = emulator.metal_kernel(**names)

        def call(**arguments: Any) -> list[mx.array]:
            calls.append((kernel, arguments))
            return kernel(**arguments)

        return call

    with run_with(recording):
        s.run()
    assert [kernel.body.name for kernel, _ in calls] == ["paged_attention_decode", "paged_attention_combine"]
    for kernel, call in calls:
        differences = emulator.compare_signature(kernel, call["inputs"], output_dtypes=call["output_dtypes"], template=call["template"])
        assert differences == []
        assert all(g % t == 0 for g, t in zip(call["grid"], call["threadgroup"], strict=True))


@needs_emulator
def test_the_plain_reference_agrees_with_the_kernel() -> None:
    s = Scene(((2, 300), (1, 70)), dim=64, heads=2)
    plain = attention_over_pages(s.q, *s.arrays, s.plan, scale=s.scale)
    with emulated():
        kernel = paged_attention_decode(s.q, *s.arrays, s.plan, scale=s.scale)
    assert largest(to_float(plain) - s.expected()) < 2e-6
    assert not np.array_equal(to_float(plain), to_float(kernel))
    assert largest(to_float(plain) - to_float(kernel)) < 2e-6


@needs_emulator
def test_the_environment_asks_for_the_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXINFER_KERNELS", "emulator")
    assert isinstance(get_kernel("seal_page/seal_page.metal", "seal_keys"), emulator.Kernel)


@pytest.mark.skipif(mx.metal.is_available() or mx.cuda.is_available(), reason="there is a GPU")
def test_kernels_say_that_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLXINFER_KERNELS", raising=False)
    with pytest.raises(RuntimeError, match="Apple GPU"):
        get_kernel("seal_page/seal_page.metal", "seal_keys")
