"""The processes that kernels run in: what happens when a kernel ends one, or never ends."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import mlx.core as mx
import pytest

from mlxinfer.kernels_metal import emulator
from mlxinfer.kernels_metal.emulator import build, modes, worker

pytestmark = pytest.mark.emulator

CALL = {"grid": (32, 1, 1), "threadgroup": (32, 1, 1), "output_shapes": [(32,)], "output_dtypes": [mx.float32]}
GOOD = emulator.metal_kernel("good", ["x"], ["out"], "uint i = thread_position_in_grid.x;\nout[i] = 2 * x[i];")


def run(source: str, **call: object) -> list[float]:
    kernel = emulator.metal_kernel("bad", ["x"], ["out"], f"uint i = thread_position_in_grid.x;\n{source}")
    return kernel(inputs=[mx.arange(32).astype(mx.float32)], **{**CALL, **call})[0].tolist()  # type: ignore[arg-type, return-value]


def check_that_all_is_well() -> None:
    assert GOOD(inputs=[mx.arange(32).astype(mx.float32)], **CALL)[0].tolist() == list(range(0, 64, 2))  # type: ignore[arg-type]


def test_a_kernel_that_does_not_end() -> None:
    with emulator.settings(timeout=0.3), pytest.raises(emulator.KernelError) as caught:
        run("volatile thread int turn = 1;\nwhile (turn) turn = 1;\nout[i] = 0;")
    assert caught.value.kind == "timeout"
    check_that_all_is_well()


@pytest.mark.parametrize(("mode", "line"), [("fast", None), ("asan", 2)])
def test_a_kernel_that_crashes(mode: str, line: int | None) -> None:
    with pytest.raises(emulator.KernelError) as caught:
        run("out[i] = x[i + (1ul << 44)];", mode=mode)
    assert (caught.value.kind, caught.value.line) == ("crash", line)
    check_that_all_is_well()


def test_a_thread_with_too_much_memory() -> None:
    with pytest.raises(emulator.KernelError, match="too much thread memory"):
        run("float big[1 << 20];\nfor (uint k = 0; k < 1 << 20; k++) big[k ^ i] = x[i] + k;\nout[i] = big[uint(x[i])];")
    check_that_all_is_well()


def test_settings_reach_what_is_called_through_others() -> None:
    missing_barrier = "threadgroup float t[32];\nt[i] = x[i];\nout[i] = t[31 - i];"
    run(missing_barrier)
    with emulator.settings(mode="trace"):
        with pytest.raises(emulator.KernelError):
            run(missing_barrier)
        with emulator.settings(order="random", seed=4):
            assert modes.current() == modes.Settings("trace", "random", 4)
        run(missing_barrier, mode="fast")
    assert modes.current() == modes.Settings()


def test_threads_take_turns() -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(20):
                check_that_all_is_well()
        except BaseException as failure:
            failures.append(failure)
            raise

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_forked_process_has_its_own() -> None:
    check_that_all_is_well()
    child = os.fork()
    if not child:
        try:
            worker.launch("fast", request(), 20)
        except BaseException:  # noqa: BLE001 - nothing of pytest may run on here
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    check_that_all_is_well()


def request() -> worker.Request:
    """Without MLX, which a forked process cannot use."""
    code = GOOD.body.code([mx.zeros((32,))], [mx.float32], ())
    x = worker.Argument("x", worker.INPUT, 128, 4, bytes(128))
    out = worker.Argument("out", worker.OUTPUT, 128, 4)
    library, size = build.library(code, "good", "fast"), (32, 1, 1)
    return worker.Request(library, grid=size, threadgroup=size, order="forward", seed=0, arguments=[x, out], files=frozenset())


def test_compiled_kernels_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXINFER_EMULATOR_CACHE", str(tmp_path))
    code = GOOD.body.code([mx.zeros((32,))], [mx.float32], ())
    first = build.library.__wrapped__(code, "good", "fast")
    assert first.parent == tmp_path
    written = first.stat().st_mtime_ns
    assert build.library.__wrapped__(code, "good", "fast").stat().st_mtime_ns == written
    other = build.library.__wrapped__(code.replace("2 * x", "3 * x"), "good", "fast")
    assert other != first
    assert {path.suffix for path in tmp_path.iterdir()} == {".so", ""}
