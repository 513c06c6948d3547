"""Nothing waits for something that waits for it: Python's threads, MLX's and the workers; and forks, and the end of the process."""

import os
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest
from support.oracles.packed_matrices import draw, random

from mlxinfer import kernels_cpu

pytestmark = pytest.mark.skipif(not kernels_cpu.available(), reason=kernels_cpu.status())

STEP = """
import os, sys, threading, mlx.core as mx
from mlxinfer import kernels_cpu

sealed = [mx.zeros((2, 3, 64, 64))] * 2
rows = [mx.ones((5, 4, 64)), mx.ones((5, 2, 64)), mx.ones((5, 2, 64))]

def step(past, open):
    plan = kernels_cpu.attention_plan([(0, 0, 5, past, 0, list(range(past // 64)))])
    rotation = kernels_cpu.rotation([([0.1] * 32, past, 5)])
    return kernels_cpu.paged_attention(rows, sealed, open, plan, scale=0.1, rotation=rotation)[:2]
"""

BUSY = (
    STEP
    + """
def talk():  # somebody else wants the interpreter's lock all the time
    while True:
        sum(range(100))

threading.Thread(target=talk, daemon=True).start()
open = [mx.zeros((1, 2, 64, 64))] * 2
weights = kernels_cpu.pack(mx.ones((64, 256)))
for i in range(400):
    out, open = step(i % 180, open)
    out = weights.multiply(out)
    mx.async_eval(out, open)
    if i % 3 == 0:
        mx.clear_cache()
    if i % 7 == 0:
        mx.synchronize()
print("done")
"""
)

FORK = (
    STEP
    + """
mx.eval(step(3, [mx.zeros((1, 2, 64, 64))] * 2))
if os.fork() == 0:
    os._exit(0 if kernels_cpu.thread_count() >= 1 else 1)
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""
)


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("threads", ["1", "3"])
def test_steps_are_dropped_while_python_is_busy_and_the_process_ends_with_some_under_way(threads):
    assert run(BUSY, MLXINFER_THREADS=threads) == "done\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_has_its_own_workers():
    assert run(FORK) == "0\n"


def test_the_graph_holds_no_reference_to_python_objects():
    """MLX's thread would wait for the interpreter's lock to drop it, while its holder may be waiting for that thread."""
    plan, rotation = kernels_cpu.attention_plan([(0, 0, 1, 0, 0, [])]), kernels_cpu.rotation([([1.0], 0, 1)])
    packed = draw(np.random.default_rng(0), ("affine", 4, 32), (5, 32)).pack()
    held = (plan, rotation, packed.layout, packed.data)
    before = [sys.getrefcount(a) for a in held]
    row, open = mx.zeros((1, 1, 8)), mx.zeros((1, 1, 64, 8))
    pages = [mx.zeros((1, 0, 8, 64)), mx.zeros((1, 0, 64, 8))]
    graph = [
        kernels_cpu.paged_attention([row] * 3, pages, [open] * 2, plan, scale=1.0, rotation=rotation),
        packed.multiply(mx.zeros((1, 32))),
        packed.rows(mx.zeros((1,), mx.int32), mx.float32),
    ]
    assert [sys.getrefcount(a) for a in held] == before
    mx.eval(graph)


def test_products_on_several_streams_at_once():
    rng = np.random.default_rng(0)
    packed = draw(rng, ("affine", 4, 64), (300, 256)).pack()
    x = random(rng, (40, 256), "float32")
    want = np.array(packed.multiply(x))
    streams = [mx.new_stream(mx.cpu) for _ in range(3)]
    results = []
    for i in range(60):
        with mx.stream(streams[i % 3]):
            results.append(packed.multiply(x))
    mx.eval(results)
    for got in results:
        np.testing.assert_array_equal(got, want)
