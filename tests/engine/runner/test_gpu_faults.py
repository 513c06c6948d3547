"""Steps that the GPU aborts are computed again, shorter if they were long, before any kernel is disabled. Faults appear where MLX raises
them: at the next operation that is encoded or waited for after the fault. Raising clears a fault."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from support.engines.tiny_engine import UNMEASURED, greedy, request, run, tiny_engine
from support.models.tiny_directory import tiny_directory

from mlxinfer import AsyncLLM, SamplingParams
from mlxinfer.cache.attention.select import may_be_kernels
from mlxinfer.engine.core import engine as engines
from mlxinfer.engine.core.engine import Engine
from mlxinfer.engine.runner import gpu_faults
from mlxinfer.engine.runner.model_runner import PendingStep
from mlxinfer.errors import EngineError, GpuFaultError
from mlxinfer.util.gpu_fault import GpuFault, gpu_fault

FAULTS = {
    "Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout)": GpuFault.SLOW,
    "Caused GPU Hang Error (00000003:kIOGPUCommandBufferCallbackErrorHang)": GpuFault.SLOW,
    "Ignored (for causing prior/excessive GPU errors) (00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored)": GpuFault.OTHERS,
    "Discarded (victim of GPU error/recovery) (00000005:kIOGPUCommandBufferCallbackErrorInnocentVictim)": GpuFault.OTHERS,
    "Innocent Victim (00000005:kIOGPUCommandBufferCallbackErrorInnocentVictim)": GpuFault.OTHERS,
    "Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)": GpuFault.MEMORY,
    "Invalid Resource (00000009:kIOGPUCommandBufferCallbackErrorInvalidResource)": GpuFault.OWN,
    "Caused GPU Address Fault Error (0000000b:kIOGPUCommandBufferCallbackErrorPageFault)": GpuFault.OWN,
    "Impacting Interactivity (0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)": GpuFault.SLOW,
    "Internal Error (0000000e:Internal Error)": GpuFault.UNKNOWN,
}
TIMEOUT, _, IGNORED, VICTIM, _, MEMORY, _, ADDRESS, INTERACTIVITY, INTERNAL = FAULTS
PROMPT = [(7 * i) % 90 + 1 for i in range(600)]


def failed(text: str) -> RuntimeError:
    """Return the exception of MLX."""
    return RuntimeError(f"[METAL] Command buffer execution failed: {text}.")


class Gpu:
    """Computes steps on the CPU, but aborts some. Late faults appear while the host waits for their step, and others at once."""

    def __init__(self) -> None:
        self.aborts: Callable[[int], str | None] = lambda rows: None
        self.late = False
        self.faults = 0
        """Faults that were raised."""
        self.rows: list[int] = []
        self.tried: list[BaseException] = []
        """Errors for which kernels were tried again."""
        self._error = ""
        self._soon: dict[int, tuple[PendingStep, str]] = {}
        """Kept with their steps, so that no other step gets the same id."""

    def check(self) -> None:
        error, self._error = self._error, ""
        if error:
            self.faults += 1
            raise failed(error)

    def submit(self, step: PendingStep) -> None:
        rows = step.schedule.prefill_rows
        self.rows.append(rows)
        text = self.aborts(rows)
        if text and self.late:
            self._soon[id(step)] = step, text
        elif text:
            self._error = self._error or text

    def wait(self, step: PendingStep) -> None:
        self._error = self._error or self._soon.pop(id(step), (step, ""))[1]
        self.check()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    found = Gpu()
    submit, collect = PendingStep.submit, PendingStep.collect

    def submitted(step: PendingStep) -> None:
        submit(step)
        found.submit(step)

    def collected(step: PendingStep) -> Any:
        found.wait(step)
        return collect(step)

    def disable_guilty(error: BaseException, *arguments: Any, **options: Any) -> bool:
        found.tried.append(error)
        return False

    def checked(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            found.check()
            return function(*arguments)

        return call

    monkeypatch.setattr(PendingStep, "submit", submitted)
    monkeypatch.setattr(PendingStep, "collect", collected)
    monkeypatch.setattr(engines, "disable_guilty", disable_guilty)
    for name in ("async_eval", "eval", "synchronize"):
        monkeypatch.setattr(mx, name, checked(getattr(mx, name)))
    return found


def engine(**settings: Any) -> Engine:
    return tiny_engine(max_context=1024, max_num_batched_tokens=512, **UNMEASURED, **settings)


def once(text: str, at: int) -> Callable[[int], str | None]:
    """Abort only the step of that number."""
    steps = iter(range(10**6))
    return lambda rows: text if next(steps) == at else None


@pytest.mark.parametrize("text", FAULTS)
def test_faults_are_told_apart(text: str) -> None:
    assert gpu_fault(failed(text)) is FAULTS[text]
    assert may_be_kernels(failed(text)) == (FAULTS[text] not in (GpuFault.OTHERS, GpuFault.MEMORY))
    assert gpu_fault(RuntimeError(text)) is None
    assert gpu_fault(ValueError(str(failed(text)))) is None


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("at", [0, 1, 5])
@pytest.mark.parametrize("text", [TIMEOUT, IGNORED, VICTIM, INTERACTIVITY, INTERNAL])
def test_one_fault_changes_no_answer_and_no_kernel(gpu: Gpu, text: str, at: int, late: bool) -> None:
    gpu.aborts, gpu.late = once(text, at), late
    assert run(engine(), [request([3, 4, 5], 12), request([6, 7], 12)]) == [greedy([3, 4, 5], 12), greedy([6, 7], 12)]
    assert gpu.faults == 1
    assert not gpu.tried


@pytest.mark.parametrize("text", [TIMEOUT, INTERACTIVITY, MEMORY])
def test_long_steps_of_prompts_are_halved_for_an_hour(gpu: Gpu, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(gpu_faults, "perf_counter", lambda: now[0])
    gpu.aborts = lambda rows: text if rows > 200 else None
    used, expected = engine(prefix_cache=False), greedy(PROMPT, 4)
    assert run(used, [request(PROMPT, 4)]) == [expected]
    assert not gpu.tried
    assert max(rows for rows in gpu.rows if rows <= 200) == 128
    assert gpu.rows[0] == 512
    now[0] += 3599
    gpu.rows.clear()
    assert run(used, [request(PROMPT, 4)]) == [expected]
    assert max(gpu.rows) == 128
    now[0] += 2
    gpu.rows.clear()
    gpu.aborts = lambda rows: None
    assert run(used, [request(PROMPT, 4)]) == [expected]
    assert max(gpu.rows) > 128


def test_later_faults_of_the_same_buffers_are_dropped(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.aborts = once(TIMEOUT, 2)
    check, left = gpu.check, [IGNORED, IGNORED]

    def more() -> None:
        if gpu.faults and left:
            gpu._error = gpu._error or left.pop()
        check()

    monkeypatch.setattr(gpu, "check", more)
    assert run(engine(), [request([3, 4, 5], 12)]) == [greedy([3, 4, 5], 12)]
    assert not left
    assert not gpu.tried


@pytest.mark.parametrize(("text", "faults"), [(IGNORED, 4), (VICTIM, 4), (TIMEOUT, 2), (INTERNAL, 2), (ADDRESS, 1), (MEMORY, 1)])
def test_kernels_are_suspected_only_after_retries(gpu: Gpu, text: str, faults: int) -> None:
    gpu.aborts, gpu.late = lambda rows: text, True
    used = engine()
    explained = FAULTS[text] not in (GpuFault.OWN, GpuFault.MEMORY)
    with pytest.raises(GpuFaultError if explained else RuntimeError, match="close other programs" if explained else "execution failed"):
        run(used, [request([3, 4, 5], 12)])
    assert gpu.faults == faults
    assert [str(error) for error in gpu.tried] == [str(failed(text))]
    gpu.aborts = lambda rows: None
    assert run(used, [request([6, 7], 12)]) == [greedy([6, 7], 12)]


def test_a_server_survives_any_number_of_them(gpu: Gpu, tmp_path: Path) -> None:
    folder = tiny_directory(tmp_path / "model", eos=False)

    async def use() -> int:
        async with AsyncLLM(folder, dtype="float32") as llm:
            for _ in range(3):
                gpu.aborts = lambda rows: VICTIM
                with pytest.raises(EngineError, match="close other programs"):
                    await llm.generate("some text", SamplingParams(max_tokens=3))
                gpu.aborts = lambda rows: None
                assert (await llm.generate("some text", SamplingParams(max_tokens=3)))[0].finish_reason == "length"
            return llm.stats().restarts

    assert asyncio.run(use()) == 3
