"""Bytes are counted as they are loaded and stored, whatever the width of an access."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlxinfer.kernels_metal import emulator

pytestmark = pytest.mark.emulator


def run(source: str, *inputs: mx.array, threads: int = 64, per_group: int = 32, name: str = "k", outputs: int = 64) -> emulator.Counts:
    kernel = emulator.metal_kernel(name, [f"x{i}" for i in range(len(inputs))], ["out"], "uint i = thread_position_in_grid.x;\n" + source)
    call = {"output_shapes": [(outputs,)], "output_dtypes": [mx.float32], "init_value": 0}
    with emulator.count_bytes() as counts:
        kernel(inputs=list(inputs), grid=(threads, 1, 1), threadgroup=(per_group, 1, 1), mode="fast", **call)  # type: ignore[arg-type]
    return counts


@pytest.mark.parametrize(
    ("kind", "elements"),
    [("uchar", 1), ("uchar4", 4), ("half", 2), ("half4", 8), ("bfloat4", 8), ("float", 4), ("float2", 8), ("uint4", 16), ("ulong4", 32)],
)
def test_every_width(kind: str, elements: int) -> None:
    x = mx.zeros((64 * elements,), mx.uint8)
    wanted = {"2": "v.x + v.y", "4": "v.x + v.y + v.z + v.w"}.get(kind[-1], "v")
    counts = run(f"{kind} v = ((const device {kind}*)x0)[i]; out[i] = float({wanted});", x)
    loaded = counts["x0"]
    assert loaded.size == loaded.loaded == loaded.fetched == loaded.distinct_loaded == 64 * elements
    assert (loaded.most_loads, loaded.stored) == (1, 0)
    assert counts["out"].stored == counts["out"].distinct_stored == 64 * 4
    assert (counts["out"].loaded, counts["out"].most_stores) == (0, 1)


def test_structs_and_matrices() -> None:
    source = (
        "struct S { uint a[6]; };\nS s = ((const device S*)x0)[i]; uint sum = 0;\nfor (int k = 0; k < 6; k++) sum += s.a[k];\nout[i] = sum;"
    )
    assert run(source, mx.zeros((64 * 6,), mx.uint32))["x0"].loaded == 64 * 24
    source = "simdgroup_float8x8 m; simdgroup_load(m, x0, 8); simdgroup_store(m, out, 8);"
    counts = run(source, mx.zeros((64,)), threads=32)
    assert (counts["x0"].loaded, counts["x0"].most_loads, counts["out"].stored) == (256, 1, 256)


def test_what_is_loaded_again() -> None:
    counts = run("float sum = 0; for (int k = 0; k < 8; k++) sum += x0[k]; out[i] = sum;", mx.zeros((16,)))
    x = counts["x0"]
    assert (x.size, x.loaded, x.fetched, x.distinct_loaded, x.most_loads) == (64, 64 * 32, 2 * 32, 32, 64)


def test_threadgroup_and_thread_memory_are_not_counted() -> None:
    source = (
        "threadgroup float t[32]; float own[8];\nt[i % 32] = x0[i]; for (int k = 0; k < 8; k++) own[k] = t[i % 32];\nout[i] = own[i % 8];"
    )
    counts = run(source, mx.zeros((64,)))
    assert counts.total() == emulator.Traffic(512, 256, 256, 256, 256, 256, 1, 1)


def test_launches_add_up() -> None:
    x = mx.zeros((64,))
    with emulator.count_bytes() as outer:
        first = run("out[i] = x0[i];", x, name="first")
        run("if (i < 32) out[i] = x0[i];", x, name="second")
    assert len(first.launches) == 1
    assert [launch.kernel for launch in outer.launches] == ["first", "second"]
    assert outer["x0"].loaded == 256 + 128
    assert outer.of("second")["x0"].loaded == 128
    with pytest.raises(KeyError, match="there are out, x0"):
        outer["y"]


def test_nothing_is_counted_outside() -> None:
    counts = run("out[i] = x0[i];", mx.zeros((64,)))
    kernel = emulator.metal_kernel("k", ["x"], ["out"], "out[0] = x[0];")
    kernel(inputs=[mx.zeros((1,))], grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[(1,)], output_dtypes=[mx.float32])
    assert len(counts.launches) == 1
