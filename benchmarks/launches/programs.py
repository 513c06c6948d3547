"""The two programs that are compared, run on a GPU that computes nothing: this project's engine, and mlx-lm's generators."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import thread_time
from typing import Any, Protocol

import mlx.core as mx

from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.config import EngineConfig
from mlxinfer.engine.core.engine import Engine
from mlxinfer.engine.core.sequence import Sequence
from mlxinfer.loading.memory.plan import plan_memory
from mlxinfer.models import Model, build
from mlxinfer.nn.packing import arrays
from mlxinfer.types import SamplingParams
from mlxinfer.util.device import DeviceMemory

from .graph import Graph
from .models import EmptyWeights, Subject
from .phantom import PhantomGPU
from .trust import trusted_kernels

STEPS = 64
"""Steps of decoding that are run: a page of each sequence is filled once."""
_ROOM = 32 * STEPS
"""Tokens that a sequence may still generate when counting begins, so that none ends while others' prompts are read."""


_DEFAULTS = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False}
"""What some published configs leave out, because transformers has it as default, and mlx-lm asks for."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What a program did between two tokens."""

    graphs: list[Graph]
    """What it submitted."""
    syncs: int
    """Times the host waited."""
    drains: int
    """Times the GPU had nothing left to do by then."""
    seconds: float
    """The host's processor time, without recording."""
    exposed: float
    """The part of that between a drain and the next submission."""


class Program(Protocol):
    """Something that generates tokens."""

    def decode(self, rows: int, past: int, steps: int = STEPS) -> list[Turn]:
        """One turn per step, of `rows` sequences with `past` tokens each before the first."""
        ...

    def prefill(self, tokens: int) -> Turn:
        """From a prompt of so many tokens to its first token on the host."""
        ...


class _Watch:
    """Cuts what a phantom GPU records into turns."""

    def __init__(self, gpu: PhantomGPU) -> None:
        self._gpu = gpu
        gpu.recording = True
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


def _tokens(count: int, seed: int) -> list[int]:
    """Below 1000, which every vocabulary has."""
    chooser = random.Random(seed)
    return [chooser.randrange(3, 1000) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class _Unread:
    """A model for the planner."""

    model: Model
    """With arrays of the sizes that its weights have."""
    load_bytes: int = 0
    """Needed besides the weights while they are read."""
    dtype: mx.Dtype = mx.bfloat16
    """That of activations."""

    @property
    def weight_bytes(self) -> int:
        return sum(a.nbytes for a in arrays(self.model))


_MAC = DeviceMemory(64 * 10**9, 48 * 10**9)


class Ours:
    """This project's engine, its attention by the Metal kernels."""

    def __init__(self, gpu: PhantomGPU, subject: Subject, kv: str = "16", chunk: int | None = None) -> None:
        """`kv` is the format of full pages; `chunk` the most rows of a step, None: what the planner chooses on a Mac of 64 GB."""
        self._gpu = gpu
        self._subject = subject
        self._kv = KVFormat.parse(kv)
        self._chunk = chunk

    @contextmanager
    def _engine(self, rows: int, tokens: int) -> Iterator[tuple[Engine, PhantomGPU]]:
        config, gpu = self._subject.config, self._gpu
        gpu.recording = False
        with trusted_kernels():
            text = config.get("text_config", config)
            model = build(
                config, EmptyWeights(self._subject.form, tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings"))))
            )
            gpu.empty(list(arrays(model)))
            settings = EngineConfig(
                max_context=tokens + _ROOM,
                kv_cache_tokens=rows * (tokens + _ROOM + 128),
                max_num_batched_tokens=self._chunk or plan_memory(_Unread(model), kv=self._kv, memory=_MAC).rows,
                max_num_seqs=rows,
                max_draft=0,
                prefix_cache=False,
                decode_share=0.01,
                max_step_s=1e6,
            )
            engine = Engine(model, settings, dtype=mx.bfloat16, kv=self._kv)
            gpu.kept = lambda: arrays([*engine.cache._stores.values(), *engine.cache._recurrent.values()])
            yield engine, gpu

    def decode(self, rows: int, past: int, steps: int = STEPS) -> list[Turn]:
        with self._engine(rows, past) as (engine, gpu):
            for i in range(rows):
                prompt = _tokens(past - i, i)  # so that pages become full one after another
                engine.add(Sequence(prompt, SamplingParams(temperature=0, max_tokens=_ROOM), 0, past + _ROOM))
            while not self._decodes(engine, rows):
                engine.step()
                if engine.idle:
                    raise RuntimeError(f"{rows} sequences never ran together")
            engine.step()
            watch = _Watch(gpu)
            return [self._turn(engine, watch) for _ in range(steps)]

    def prefill(self, tokens: int) -> Turn:
        with self._engine(1, tokens) as (engine, gpu):
            watch = _Watch(gpu)
            sequence = Sequence(_tokens(tokens, 0), SamplingParams(temperature=0, max_tokens=1), 0, tokens + 1)
            engine.add(sequence)
            while not engine.idle:
                engine.step()
            return watch.turn()

    @staticmethod
    def _turn(engine: Engine, watch: _Watch) -> Turn:
        engine.step()
        return watch.turn()

    @staticmethod
    def _decodes(engine: Engine, rows: int) -> bool:
        pending = engine._pending
        return pending is not None and pending.schedule.decode_rows == rows and not pending.schedule.prefill_rows


class MLXLM:
    """mlx-lm's own graph of the model, by the generator that its commands use: `generate_step`, and for several rows `BatchGenerator`."""

    def __init__(self, gpu: PhantomGPU, subject: Subject) -> None:
        import mlx.nn as nn
        from mlx_lm.utils import _get_classes

        config = _DEFAULTS | subject.config
        kind, arguments = _get_classes(config)  # type: ignore[no-untyped-call]
        model = kind(arguments.from_dict(config))
        model.eval()  # as mlx-lm's own loading leaves it: some kernels are for that only
        model.set_dtype(mx.bfloat16)
        form = subject.form
        if form is not None:
            nn.quantize(  # type: ignore[attr-defined]
                model, form.group_size, form.bits, class_predicate=_takes(model, form.group_size)
            )
        gpu.empty([a for module in model.modules() for a in module.values() if isinstance(a, mx.array)])
        self._model, self._gpu = model, gpu

    def decode(self, rows: int, past: int, steps: int = STEPS) -> list[Turn]:
        return self._alone(past, steps) if rows == 1 else self._together(rows, past, steps)

    def _alone(self, past: int, steps: int) -> list[Turn]:
        answer = self._answer(past, STEPS + 8)
        for _ in range(3):
            next(answer)
        watch = _Watch(self._gpu)
        return [self._turn(answer, watch) for _ in range(steps)]

    def _answer(self, past: int, most: int) -> Any:
        from mlx_lm.generate import generate_step
        from mlx_lm.models.cache import make_prompt_cache

        self._gpu.recording = False
        cache = make_prompt_cache(self._model)
        self._gpu.kept = lambda: _held(cache)
        return generate_step(mx.array(_tokens(past, 0)), self._model, max_tokens=most, prompt_cache=cache)

    def _together(self, rows: int, past: int, steps: int) -> list[Turn]:
        from mlx_lm.generate import BatchGenerator

        self._gpu.recording = False
        batch: Any = BatchGenerator(self._model, max_tokens=STEPS + 64)  # type: ignore[no-untyped-call]
        self._gpu.kept = lambda: _held([batch._generation_batch.prompt_cache, batch._prompt_batch.prompt_cache])
        batch.insert([_tokens(past - i, i) for i in range(rows)])
        while len(batch.next_generated()) < rows:
            pass
        batch.next_generated()
        watch, turns = _Watch(self._gpu), []
        for _ in range(steps):
            batch.next_generated()
            turns.append(watch.turn())
        batch.close()
        return turns

    def prefill(self, tokens: int) -> Turn:
        answer = self._answer(tokens, 1)
        watch = _Watch(self._gpu)
        next(answer)
        return watch.turn()

    @staticmethod
    def _turn(answer: Any, watch: _Watch) -> Turn:
        next(answer)
        return watch.turn()


def _takes(model: Any, group: int) -> Any:
    """What mlx-lm's own conversion quantizes."""
    chosen = getattr(model, "quant_predicate", None)

    def predicate(path: str, module: Any) -> Any:
        if not hasattr(module, "to_quantized") or module.weight.shape[-1] % group:
            return False
        return chosen(path, module) if chosen else True

    return predicate


def _held(node: Any) -> Iterator[mx.array]:
    """Arrays in caches, which are lists of objects of mlx-lm."""
    if isinstance(node, mx.array):
        yield node
    elif isinstance(node, (list, tuple)):
        for each in node:
            yield from _held(each)
    elif hasattr(node, "__dict__") and type(node).__module__.startswith("mlx_lm"):
        yield from _held(list(vars(node).values()))
