"""Prefill attention in the emulator against float64: formats, head sizes, numbers of heads, and every kind of step."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from support.kernels.emulated import emulated, needs_emulator
from support.oracles.prefill_scenes import PrefillScene
from support.oracles.sealed_pages import to_float
from support.processes.examples import examples

from mlxinfer.errors import UnsupportedShapeError
from mlxinfer.kernels_metal import emulator
from mlxinfer.kernels_metal.paged_attention.plan import Pools, SegmentRows
from mlxinfer.kernels_metal.paged_attention.tiles import DIMS, Shape
from mlxinfer.kernels_metal.paged_attention_prefill.plan import plan_prefill
from mlxinfer.kernels_metal.paged_attention_prefill.tiles import prefill_tile

F32, F16, BF16 = mx.float32, mx.float16, mx.bfloat16
BITS = (16, 8, 6, 5, 4, 3, 2)
ROUNDING = {F32: 2.0**-24, F16: 2.0**-11, BF16: 2.0**-8}
"""Relative error of storing the exact answer: half the distance of two numbers, in units of the larger one."""

SCENES = {
    "one row, nothing before": PrefillScene(((0, 1),), 16, 16),
    "to the end of the open page": PrefillScene(((0, 64), (63, 1), (70, 58)), 8, 8, group=1),
    "across pages": PrefillScene(((5, 190),), 4, 4, dtype=F16),
    "ragged, first pages apart": PrefillScene(((70, 70), (0, 3), (0, 130), (128, 65)), 4, 8, group=4, first16=True),
    "window, sinks, cap": PrefillScene(((70, 70), (301, 9)), 5, 3, 80, 96, 3, 1, F16, window=40, softcap=2.0, sinks=True),
    "window of one page": PrefillScene(((200, 100),), 6, 2, 128, 64, 8, 1, BF16, window=64),
    "window of one token": PrefillScene(((65, 70),), 2, 6, 64, group=1, kv_heads=1, window=1, sinks=True),
    "keys plain, values not": PrefillScene(((64, 80),), 16, 4, 64, group=16, kv_heads=1, dtype=BF16),
    "values plain, keys not": PrefillScene(((64, 80),), 3, 16, 96, group=2, kv_heads=1, dtype=F16, sinks=True),
    "plain": PrefillScene(((100, 90), (10, 20)), 16, 16, 64, 128, 3, 1, BF16, window=100, first16=True),
    "heads of 256": PrefillScene(((100, 40),), 4, 4, 256, group=2, kv_heads=1, dtype=BF16, softcap=5.0),
    "heads of 512": PrefillScene(((100, 30),), 8, 5, 512, group=2, kv_heads=1, dtype=F16),
    "heads of 512, float32": PrefillScene(((60, 12),), 8, 8, 512, group=1, kv_heads=1),
    "272, in two parts of different size": PrefillScene(((60, 20),), 6, 3, 80, 272, 2, 1, F16),
    "192 and 128": PrefillScene(((130, 20),), 8, 4, 192, 128, 4, 1, F16, first16=True),
}


def check(scene: PrefillScene) -> None:
    """The root-mean-square error is at most that of MLX's attention to the same keys and values, rounded to the same dtype. In float32,
    where all errors are roundings of sums, the order of additions decides which one is smaller."""
    with emulated():
        answer = to_float(scene.run())
    expected = scene.expected()
    floor = ROUNDING[scene.dtype] * np.abs(expected).max()
    ours, theirs = answer - expected, scene.stock() - expected
    allowed = 1.5 if scene.dtype == F32 else 1.0
    assert np.sqrt(np.mean(ours**2)) <= max(allowed * np.sqrt(np.mean(theirs**2)), floor / 2)
    assert np.abs(ours).max() <= max(2 * allowed * np.abs(theirs).max(), floor)


@needs_emulator
@pytest.mark.parametrize("name", SCENES)
def test_against_float64(name: str) -> None:
    check(SCENES[name])


@needs_emulator
def test_steps_of_any_kind() -> None:
    """One compiled kernel, many steps: nothing about them is compiled in."""
    chance = random.Random(5)
    pasts, counts = (0, 1, 5, 63, 64, 65, 127, 128, 200, 301), (0, 1, 2, 7, 8, 9, 15, 16, 17, 63, 64, 65, 100)
    for seed in range(examples(30)):
        sequences = tuple((chance.choice(pasts), chance.choice(counts)) for _ in range(chance.randint(1, 4)))
        scene = PrefillScene(
            ((chance.choice(pasts), 1), *sequences),
            5,
            3,
            64,
            80,
            3,
            dtype=F16,
            window=chance.choice((None, None, 1, 2, 63, 64, 65, 100, 1000)),
            softcap=chance.choice((None, 3.0)),
            sinks=chance.random() < 0.5,
            first16=chance.random() < 0.5,
            seed=seed,
        )
        check(scene)


@needs_emulator
@pytest.mark.slow
@pytest.mark.parametrize(("k_bits", "v_bits"), list(itertools.product(BITS, BITS)))
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_all_bits(k_bits: int, v_bits: int, dtype: mx.Dtype) -> None:
    check(PrefillScene(((70, 70), (5, 60)), k_bits, v_bits, 64, group=2, dtype=dtype, seed=k_bits))


@needs_emulator
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dim", "value_dim"), [*((d, d) for d in (64, 72, 80, 96, 128, 192, 256, 264, 512)), (64, 512), (512, 64), (96, 80)]
)
@pytest.mark.parametrize("group", [1, 3, 4, 8, 16])
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_all_shapes(dim: int, value_dim: int, group: int, dtype: mx.Dtype) -> None:
    check(PrefillScene(((90, 50),), 4, 5, dim, value_dim, group, 1, dtype, seed=dim))


@needs_emulator
@pytest.mark.slow
def test_far_behind() -> None:
    check(PrefillScene(((4096, 70),), 4, 4, kv_heads=1))


@needs_emulator
def test_where_a_step_is_cut_changes_nothing() -> None:
    """A prompt in one step gets the same answers as in parts, bit for bit."""
    whole = PrefillScene(((0, 200),), 4, 4, group=2, kv_heads=1, dtype=F16, window=90)
    with emulated():
        at_once = to_float(whole.run())
        for cuts in ((64, 128), (1, 70, 199), (100,)):
            parts = [_part(whole, a, b) for a, b in itertools.pairwise((0, *cuts, 200))]
            assert np.array_equal(np.concatenate(parts), at_once), cuts


def _part(whole: PrefillScene, begin: int, end: int) -> np.ndarray:
    part = replace(whole, sequences=((begin, end - begin),))
    part.__dict__["tokens"] = [tuple(x[:, :end] for x in whole.tokens[0])]
    part.__dict__["q"] = whole.q[begin:end]
    return to_float(part.run())


@needs_emulator
@pytest.mark.parametrize("name", ["ragged, first pages apart", "window, sinks, cap"])
def test_every_order_gives_the_same_bits(name: str) -> None:
    scene = SCENES[name]
    with emulated():
        forward = to_float(scene.run())
    for order in ("reversed", "random"):
        with emulated(order=order, seed=3):
            assert np.array_equal(to_float(scene.run()), forward)


@needs_emulator
@pytest.mark.parametrize("mode", ["asan", "tsan", "msan"])
def test_clean_under_sanitizers(mode: str) -> None:
    scene = PrefillScene(((70, 21), (0, 65), (3, 9)), 5, 3, 80, 96, 3, 2, F16, window=90, softcap=3.0, sinks=True, first16=True)
    with emulated(mode):
        scene.run()


@needs_emulator
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["asan", "tsan", "msan"])
@pytest.mark.parametrize("name", SCENES)
def test_every_scene_is_clean_under_sanitizers(mode: str, name: str) -> None:
    with emulated(mode):
        SCENES[name].run()


@needs_emulator
def test_keys_and_values_are_fetched_once_for_each_tile_of_rows() -> None:
    """No score reaches memory, and codes are not read once for every row or head: a tile is 16 rows of four heads here."""
    scene = PrefillScene(((256, 32),), 4, 4, group=4, kv_heads=2, dtype=F16)
    with emulated(), emulator.count_bytes() as counts:
        scene.run()
    tiles = scene.plan.count
    assert tiles == 2
    page = 2 * 4 * 64 * 64 // 2
    for name in ("sealed_keys", "sealed_values"):
        assert counts[name].loaded == counts[name].fetched == tiles * page
        assert counts[name].most_loads == tiles
    assert counts.total().stored == counts["out"].stored == 32 * 8 * 64 * 2
    assert counts["out"].most_stores == 1


@needs_emulator
def test_its_parameters_are_those_that_mlx_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def recording(**made):
        kernel = emulator.metal_kernel(**made)

        def call(**given):
            calls.append((kernel, given))
            return [mx.zeros(s, d) for s, d in zip(given["output_shapes"], given["output_dtypes"], strict=True)]

        return call

    from mlxinfer.kernels_metal.executors import run_with

    for group in (1, 16):  # fewer than eight sinks, and more
        with run_with(recording):
            PrefillScene(((0, 3),), 4, 16, group=group, kv_heads=1, sinks=True).run()
        kernel, given = calls.pop()
        differences = emulator.compare_signature(kernel, given["inputs"], output_dtypes=given["output_dtypes"], template=given["template"])
        assert differences == []


SHAPE = Shape(F16, 4, 2, 64, 64, 4, 4)
POOLS = Pools(pages=3, first_pages=1, slots=2)


@pytest.mark.parametrize(
    ("rows", "what"),
    [
        (SegmentRows(0, 0, 9, 0, []), "rows 0 to 9 of 8 queries"),
        (SegmentRows(0, -1, 4, 0, []), "rows -1 to 3"),
        (SegmentRows(0, 0, -1, 0, []), "rows 0 to -1"),
        (SegmentRows(2, 0, 8, 0, []), "slot 2 of 2"),
        (SegmentRows(0, 0, 8, 130, [1]), "130 tokens have 2 sealed pages"),
        (SegmentRows(0, 0, 8, 63, [1]), "63 tokens have 0 sealed pages"),
        (SegmentRows(0, 0, 8, 64, [3]), "page id 3 with 3 sealed and 1 first pages"),
        (SegmentRows(0, 0, 8, 64, [-2]), "page id -2"),
        (SegmentRows(0, 0, 8, 130, [1], 1), "page 0 is within the window"),
    ],
)
def test_rows_that_cannot_be(rows: SegmentRows, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        plan_prefill(SHAPE, [rows], POOLS, query_rows=8)


def test_a_window_that_sees_nothing() -> None:
    with pytest.raises(ValueError, match="sees nothing"):
        plan_prefill(SHAPE, [], POOLS, query_rows=0, window=0)


UNKNOWN = [{"k_bits": 7}, {"key_dim": 70}, {"value_dim": 520}, {"heads": 34}, {"heads": 3}, {"dtype": mx.float64}]


@pytest.mark.parametrize("change", UNKNOWN, ids=str)
def test_shapes_without_a_kernel(change: dict[str, object]) -> None:
    with pytest.raises(UnsupportedShapeError):
        plan_prefill(replace(SHAPE, **change), [], POOLS, query_rows=0)


def test_steps_without_rows() -> None:
    scene = PrefillScene(((0, 0), (70, 0)))
    assert scene.run().shape == (0, 4, 64)


@needs_emulator
def test_a_sequence_without_rows_beside_others() -> None:
    check(PrefillScene(((0, 0), (64, 10), (65, 0))))


@pytest.mark.parametrize("name", ["q", "k", "v", "sealed", "filled", "first", "open", "sinks"])
def test_arrays_that_do_not_fit(name: str) -> None:
    from mlxinfer.kernels_metal.paged_attention_prefill.launcher import paged_attention_prefill

    scene = PrefillScene(((70, 70),), first16=True, sinks=True)
    sealed, filled, first, opened = scene.cache
    arrays = {"q": scene.q, "k": scene.new[0], "v": scene.new[1], "sealed": sealed, "filled": filled, "first": first, "open": opened}
    sinks = scene.sink_logits
    if name == "sinks":
        sinks = mx.zeros((3,))
    elif isinstance(arrays[name], list):
        arrays[name] = [arrays[name][0][:, :0], *arrays[name][1:]]
    else:
        arrays[name] = arrays[name].astype(F16)
    with pytest.raises(ValueError, match="expected"):
        paged_attention_prefill(*arrays.values(), scene.plan, scale=1.0, sinks=sinks)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_every_tile_fits_its_threadgroup(dtype: mx.Dtype) -> None:
    for group, key_dim, value_dim in itertools.product(range(1, 17), DIMS[::3], DIMS[::2]):
        tile = prefill_tile(Shape(dtype, group, 1, key_dim, value_dim, 4, 4))
        assert tile.threads <= 256
        assert group % tile.heads == 0
        assert 64 % tile.rows == 0
        assert tile.keys * (max(key_dim, value_dim) + 8) * dtype.size <= 20 * 1024
        assert -(-value_dim // 8 // tile.splits) * 8 <= 256
