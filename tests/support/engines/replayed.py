"""Engines whose steps MLX really traces and replays, on a machine without a GPU."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
import pytest

from mlxinfer.cache.attention import metal, select, trial
from mlxinfer.cache.kv_quantization import PLAIN
from mlxinfer.engine.core import engine as engine_module
from mlxinfer.engine.core.engine import Engine
from mlxinfer.engine.core.prefill_budget import PrefillBudget
from mlxinfer.engine.runner import compiled_step, model_runner, replay_check
from mlxinfer.engine.runner.compiled_step import CompiledSteps
from mlxinfer.engine.runner.model_runner import COMPILED_STEPS
from mlxinfer.kernels_metal.paged_attention import tiles

from ..oracles.traceable_attention import TraceableAppend, traceable_decode
from .drafting import Free
from .tiny_engine import tiny_engine

_DISABLED, _NO_FUSE, _ENABLED = 0, 2, 3
"""`mlx::core::CompileMode`."""


@contextmanager
def real_traces() -> Iterator[None]:
    """`mx.compile` traces and replays, but fuses nothing: for a CPU that would need a C++ compiler and seconds, and on a GPU it rounds
    differently. Python has no name for that. With compilation off, as tests are on a CPU, a compiled function is called anew each time, and
    nothing that a trace captures shows."""
    if shutil.which("g++") is None and not mx.metal.is_available():
        pytest.skip("MLX traces nothing on a CPU without g++")
    library = next(Path(mx.__file__ or "").parent.glob("lib/libmlx.*"))
    set_mode = ctypes.CDLL(str(library))._ZN3mlx4core16set_compile_modeENS0_11CompileModeE
    set_mode.argtypes, set_mode.restype = [ctypes.c_int], None
    set_mode(_NO_FUSE)
    try:
        yield
    finally:
        set_mode(_ENABLED if mx.metal.is_available() else _DISABLED)


@contextmanager
def choices_of_a_gpu(*, checked: int | None = None) -> Iterator[None]:
    """The choices of a Mac, with a kernel that MLX can trace here as it traces Metal's there. `checked`: steps that are compared before
    one is replayed; None: replays are trusted."""
    with pytest.MonkeyPatch.context() as patch, real_traces():
        if checked is None:
            patch.setenv(COMPILED_STEPS, "1")
        else:
            patch.delenv(COMPILED_STEPS, raising=False)
            patch.setattr(replay_check, "STEPS", checked)
        patch.delenv(select.SWITCH, raising=False)
        patch.setattr(select.kernels_cpu, "in_use", lambda: False)
        patch.setattr(select, "has_gpu_kernels", lambda: True)
        plain_prompts = metal.MetalAttention("prompts by plain MLX in all formats", unseals=False)
        patch.setattr(select, "gpu_backend", lambda *_: plain_prompts)
        patch.setattr(tiles, "DIMS", range(8, 1025, 8))  # heads of tiny models
        patch.setattr(metal, "append_launch", TraceableAppend)
        patch.setattr(metal, "paged_attention_decode", traceable_decode)
        patch.setattr(metal, "_SEALING", PLAIN)
        patch.setattr(engine_module, "StepTimes", Free)  # schedules do not depend on the clock
        patch.setattr(PrefillBudget, "allowance", lambda _, rows, wanted, most, *__: max(min(wanted, most), 0))
        patch.setattr(model_runner, "kernels_in_use", lambda: True)
        patch.setattr(compiled_step.executors, "traceable", lambda: True)
        try:
            yield
        finally:
            trial.forget_trials()
            replay_check.forget()


def engine(name: str = "llama", **settings: object) -> Engine:
    """One that replays what it can."""
    values = {"prefix_cache": False, "max_context": 640, "max_draft": 0, "max_num_batched_tokens": 256}
    return tiny_engine(name, **{**values, **settings})


def built(name: str = "llama", **settings: object) -> Engine:
    """One that builds every step."""
    made = engine(name, **settings)
    made.runner.compiled = None
    return made


def by_traces(made: Engine) -> int:
    """Steps that a trace computed, alone or beside Python."""
    return steps(made).replayed + steps(made).checked


def steps(made: Engine) -> CompiledSteps:
    assert made.runner.compiled is not None
    return made.runner.compiled
