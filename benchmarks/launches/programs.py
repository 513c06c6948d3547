"""The two programs on the phantom GPU: this project's engine and mlx-lm's generators."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from time import thread_time
from typing import Any, Protocol
from unittest.mock import patch

import mlx.core as mx

from mlxinfer.cache.attention.metal import METAL
from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.config import EngineConfig
from mlxinfer.engine.core.engine import Engine
from mlxinfer.engine.core.sequence import Sequence
from mlxinfer.engine.runner.model_runner import COMPILED_STEPS
from mlxinfer.errors import MemoryPlanError, UnsupportedShapeError
from mlxinfer.kernels_metal.kernel_trial import Speed, Verdict
from mlxinfer.kernels_metal.quantized_matmul.launcher import ROWS
from mlxinfer.loading.memory.plan import plan_memory
from mlxinfer.loading.weights import EmptyWeights
from mlxinfer.models import Model, build
from mlxinfer.nn import few_row_experts, small_batch_matmul
from mlxinfer.nn.packing import arrays
from mlxinfer.types import SamplingParams
from mlxinfer.util.device import DeviceMemory

from .graph import Graph
from .models import Subject
from .phantom import PhantomGPU

STEPS = 64
"""Decode steps. In so many, each sequence fills one page."""
_WARM = 40
"""Decode steps before the host's time is measured: most shapes have occurred by then."""
_ROOM = 32 * STEPS
"""Tokens that a sequence may generate, so none ends while the prompts of others are read."""

_DEFAULTS = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False}
"""Keys that mlx-lm requires, and that some published configs leave to the defaults of transformers."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The work of a program between two tokens.

    `syncs` counts waits of the host, `drains` those after which the GPU had nothing left to do. `seconds` is the host's processor time
    without recording. `exposed` is its part between a drain and the next submission.
    """

    graphs: list[Graph]
    syncs: int
    drains: int
    seconds: float
    exposed: float


class Program(Protocol):
    """A program that generates tokens."""

    def decode(self, rows: int, past: int, steps: int = STEPS, *, recording: bool = True) -> list[Turn]:
        """One turn per step of `rows` sequences, each after `past` tokens; without graphs unless `recording`."""
        ...

    def prefill(self, tokens: int) -> Turn:
        """From a prompt of `tokens` tokens to the first token on the host."""
        ...


class _Watch:
    """Cuts the record of a phantom GPU into turns."""

    def __init__(self, gpu: PhantomGPU, recording: bool = True) -> None:
        self._gpu = gpu
        gpu.recording = recording
        gpu.graphs.clear()
        self._mark()

    def _mark(self) -> None:
        gpu = self._gpu
        self._before = len(gpu.graphs), gpu.syncs, gpu.drains, gpu.exposed, gpu.seconds, thread_time()

    def turn(self) -> Turn:
        gpu, (graphs, syncs, drains, exposed, recording, start) = self._gpu, self._before
        seconds = thread_time() - start - (gpu.seconds - recording)
        found = Turn(gpu.graphs[graphs:], gpu.syncs - syncs, gpu.drains - drains, seconds, gpu.exposed - exposed)
        self._mark()
        return found

    def turns(self, steps: int, step: Callable[[], object]) -> list[Turn]:
        found = []
        for _ in range(steps):
            step()
            found.append(self.turn())
        return found


def _tokens(count: int, seed: int) -> list[int]:
    """Random tokens below 1000, which every vocabulary has."""
    chooser = random.Random(seed)
    return [chooser.randrange(3, 1000) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class _Unread:
    """A model for the memory plan, whose arrays have the sizes of its weights."""

    model: Model
    load_bytes: int = 0
    dtype: mx.Dtype = mx.bfloat16

    @property
    def weight_bytes(self) -> int:
        return sum(a.nbytes for a in arrays(self.model))


_MACS = DeviceMemory(64 * 10**9, 48 * 10**9), DeviceMemory(512 * 10**9, 400 * 10**9)


def _rows_of_a_step(model: Model, kv: KVFormat) -> int:
    """Rows of a step in the memory plan of the smallest of `_MACS` that holds the model. Raises `MemoryPlanError`."""
    *others, largest = _MACS
    for mac in others:
        with suppress(MemoryPlanError):
            return plan_memory(_Unread(model), kv=kv, memory=mac).rows
    return plan_memory(_Unread(model), kv=kv, memory=largest).rows


class Ours:
    """This project's engine, with the Metal kernels for attention."""

    def __init__(self, gpu: PhantomGPU, subject: Subject, kv: str = "16", chunk: int | None = None, *, replays: bool = False) -> None:
        """`kv` is the format of full pages. `chunk` is the most rows of a step; None: the memory plan's choice on a Mac of 64 GB. With
        `replays`, MLX replays steps, which have the same launches."""
        self._gpu, self._subject, self._kv, self._chunk = gpu, subject, KVFormat.parse(kv), chunk
        self._replays = replays

    @contextmanager
    def _engine(self, rows: int, tokens: int) -> Iterator[tuple[Engine, PhantomGPU]]:
        config, gpu = self._subject.config, self._gpu
        gpu.recording = False
        with trusted_kernels(), patch.dict(os.environ, {COMPILED_STEPS: str(int(self._replays))}):
            text = config.get("text_config", config)
            tied = bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings")))
            model = build(config, EmptyWeights(self._subject.form, tied=tied))
            gpu.empty(list(arrays(model)))
            chunk = self._chunk or _rows_of_a_step(model, self._kv)
            settings = EngineConfig(
                max_context=tokens + _ROOM, kv_cache_tokens=rows * (tokens + _ROOM + 128), max_num_batched_tokens=chunk, max_num_seqs=rows,
                max_draft=0, prefix_cache=False, decode_share=0.01, max_step_s=1e6,
            )  # fmt: skip
            engine = Engine(model, settings, dtype=mx.bfloat16, kv=self._kv)
            gpu.kept = lambda: arrays([*engine.cache._stores.values(), *engine.cache._recurrent.values()])
            yield engine, gpu

    def decode(self, rows: int, past: int, steps: int = STEPS, *, recording: bool = True) -> list[Turn]:
        with self._engine(rows, past) as (engine, gpu):
            for i in range(rows):
                prompt = _tokens(past - i, i)  # pages become full one after another
                engine.add(Sequence(prompt, SamplingParams(temperature=0, max_tokens=_ROOM), 0, past + _ROOM))
            while not self._decodes(engine, rows):
                engine.step()
                if engine.idle:
                    raise RuntimeError(f"{rows} sequences never ran together")
            for _ in range(1 if recording else _WARM):
                engine.step()
            turns = _Watch(gpu, recording).turns(steps, engine.step)
            compiled = engine.runner.compiled
            if self._replays and (compiled is None or compiled.replayed < steps // 2):
                raise RuntimeError(f"MLX replays too few steps of {self._subject.name} to measure them")
            return turns

    def prefill(self, tokens: int) -> Turn:
        with self._engine(1, tokens) as (engine, gpu):
            watch = _Watch(gpu)
            engine.add(Sequence(_tokens(tokens, 0), SamplingParams(temperature=0, max_tokens=1), 0, tokens + 1))
            while not engine.idle:
                engine.step()
            return watch.turn()

    @staticmethod
    def _decodes(engine: Engine, rows: int) -> bool:
        pending = engine._pending
        return pending is not None and pending.schedule.decode_rows == rows and not pending.schedule.prefill_rows


class MLXLM:
    """mlx-lm, with the generators of its commands: `generate_step`, and for several rows `BatchGenerator`."""

    def __init__(self, gpu: PhantomGPU, subject: Subject) -> None:
        import mlx.nn as nn
        from mlx_lm.utils import _get_classes

        config = _DEFAULTS | subject.config
        kind, arguments = _get_classes(config)  # type: ignore[no-untyped-call]
        model = kind(arguments.from_dict(config))
        model.eval()  # as after mlx-lm's loading; some kernels require it
        model.set_dtype(mx.bfloat16)
        form = subject.form
        if form is not None:
            predicate = _quantizable(model, form.group_size)
            nn.quantize(model, form.group_size, form.bits, class_predicate=predicate)  # type: ignore[attr-defined]
        gpu.empty([a for module in model.modules() for a in module.values() if isinstance(a, mx.array)])
        self._model, self._gpu = model, gpu

    def decode(self, rows: int, past: int, steps: int = STEPS, *, recording: bool = True) -> list[Turn]:
        if rows > 1:
            return self._together(rows, past, steps, recording)
        answer = self._answer(past, 2 * STEPS)
        for _ in range(3 if recording else _WARM):
            next(answer)
        return _Watch(self._gpu, recording).turns(steps, lambda: next(answer))

    def _answer(self, past: int, most: int) -> Any:
        from mlx_lm.generate import generate_step
        from mlx_lm.models.cache import make_prompt_cache

        self._gpu.recording = False
        cache = make_prompt_cache(self._model)
        self._gpu.kept = lambda: _held(cache)
        return generate_step(mx.array(_tokens(past, 0)), self._model, max_tokens=most, prompt_cache=cache)

    def _together(self, rows: int, past: int, steps: int, recording: bool) -> list[Turn]:
        from mlx_lm.generate import BatchGenerator

        self._gpu.recording = False
        batch: Any = BatchGenerator(self._model, max_tokens=2 * STEPS)  # type: ignore[no-untyped-call]
        self._gpu.kept = lambda: _held([batch._generation_batch.prompt_cache, batch._prompt_batch.prompt_cache])
        batch.insert([_tokens(past - i, i) for i in range(rows)])
        while len(batch.next_generated()) < rows:
            pass
        for _ in range(1 if recording else _WARM):
            batch.next_generated()
        turns = _Watch(self._gpu, recording).turns(steps, batch.next_generated)
        batch.close()
        return turns

    def prefill(self, tokens: int) -> Turn:
        answer = self._answer(tokens, 1)
        watch = _Watch(self._gpu)
        next(answer)
        return watch.turn()


def _quantizable(model: Any, group: int) -> Any:
    """The predicate of mlx-lm's conversion."""
    chosen = getattr(model, "quant_predicate", None)

    def predicate(path: str, module: Any) -> Any:
        if not hasattr(module, "to_quantized") or module.weight.shape[-1] % group:
            return False
        return chosen(path, module) if chosen else True

    return predicate


def _held(node: Any) -> Iterator[mx.array]:
    """Arrays in caches, which are lists of mlx-lm's objects."""
    if isinstance(node, mx.array):
        yield node
    elif isinstance(node, (list, tuple)):
        for each in node:
            yield from _held(each)
    elif hasattr(node, "__dict__") and type(node).__module__.startswith("mlx_lm"):
        yield from _held(list(vars(node).values()))


@contextmanager
def trusted_kernels() -> Iterator[None]:
    """Use every kernel for every shape that it supports. On the phantom GPU no kernel could pass its trial or be measured."""
    with ExitStack() as stack:
        stack.enter_context(patch("mlxinfer.cache.attention.select.gpu_backend", lambda *_: METAL))
        stack.enter_context(patch("mlxinfer.kernels_metal.kernel_trial.KernelTrial.problem", _problem))
        stack.enter_context(patch("mlxinfer.kernels_metal.executors.measurable", lambda: False))
        stack.enter_context(patch("mlxinfer.kernels_metal.kept_trials.trials_file", lambda: None))
        used = Verdict(speeds=dict.fromkeys(ROWS, Speed(1.0)))
        for trial in (small_batch_matmul.TRIAL, few_row_experts.TRIAL):
            stack.enter_context(patch.object(trial, "verdicts", _Always(used)))
        yield


def _problem(trial: Any, kind: tuple[Any, ...]) -> Verdict | None:
    """Return the obstacle if no kernel exists for this kind. Its results do not matter."""
    try:
        trial._check(*kind)
    except UnsupportedShapeError as error:
        return Verdict(str(error))
    return None


class _Always(dict[Any, Any]):
    """A dictionary that has the same value for every key."""

    def __init__(self, value: Any) -> None:
        super().__init__({None: value})

    def get(self, key: Any, default: Any = None) -> Any:
        return self[None]
