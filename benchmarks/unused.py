"""What hooks and adapters cost a step of which no sequence has any.

Three figures, because none is enough alone. The questions that a step asks ("has any of these hooks? an adapter?") are timed by
themselves: exact, but only what was thought of. The bytecode instructions of whole steps are counted, as they are and where there is
nothing to ask: all that Python does, the same on every machine, but not what is computed. And whole steps are run in turns, in one
process with the same model, adapters and pages: all of it, but with the machine's noise. Processor time of all threads, not seconds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import process_time, thread_time
from types import FrameType
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import numpy as np

from mlxinfer import LLM
from mlxinfer.adapters.adapted_model import AdaptedModel
from mlxinfer.bench.measure import Bench
from mlxinfer.engine.core.engine import Engine
from mlxinfer.engine.core.scheduler import Work
from mlxinfer.engine.runner.model_runner import ModelRunner

RANK, ADAPTERS = 8, ("a", "b")
_BLOCK = 8
"""Steps of a kind before the other's turn."""
_CALLS = 20_000
"""Calls of which a question's time is the mean."""
_DEPTH = 32
"""Tokens that a sequence has when it begins."""


@dataclass(frozen=True, slots=True)
class Unused:
    """What is not used, and costs something all the same."""

    streams: int
    """Sequences in a step."""
    step_ms: float
    """Processor time of a step, in ms: the median of its blocks."""
    hooks_us: float
    """Processor time of asking for hooks once, in microseconds."""
    adapters_us: float
    """Processor time of asking for adapters once, in microseconds, where adapters are loaded."""
    hooks: tuple[float, float, float]
    """Processor time of steps that ask for hooks over that of steps that do not, minus one: lower quartile, median, upper quartile."""
    adapters: tuple[float, float, float]
    """The same for steps of a model that has adapters loaded."""
    instructions: tuple[float, float, float]
    """Bytecode instructions of a step: with both questions, without that for adapters, without that for hooks."""


def measure(model: Path | str, streams: int, pairs: int) -> Unused:
    """`pairs` blocks of each kind. Raises `MLXInferError`."""
    with TemporaryDirectory() as temporary:
        paths = {name: write_adapter(model, Path(temporary) / name, seed) for seed, name in enumerate(ADAPTERS)}
        steps = _BLOCK * (4 * pairs + 20)
        context = _DEPTH + steps + 16
        with (
            LLM(model, adapters=paths, speculate=False, prefix_cache=False, max_num_seqs=streams, max_context=context) as llm,
            Bench(llm.engine).filled(_DEPTH, streams, steps) as held,
        ):
            for sequence in held:
                llm.engine.scheduler.run(sequence)
            return _measured(llm.engine, streams, pairs)


def _measured(engine: Engine, streams: int, pairs: int) -> Unused:
    _block(engine)
    plain = _block(engine)
    hooks = [_ratio(lambda: _with_parts(engine, _PARTS), lambda: _with_parts(engine, _one_part), pair) for pair in range(pairs)]
    adapters = [_ratio(lambda: _block(engine), lambda: _without_adapters(engine), pair) for pair in range(pairs)]
    step_ms = 1e3 * median([plain, *(_block(engine) for _ in range(8))]) / _BLOCK
    counts = _instructions(engine), _without_adapters(engine, _instructions), _with_parts(engine, _one_part, _instructions)
    work, runner = [Work(s, 1, 0, True) for s in engine.scheduler.running], engine.runner
    adapted = runner.adapted
    assert adapted is not None
    return Unused(
        streams,
        step_ms,
        _microseconds(lambda: runner._parts(work)) - _microseconds(lambda: [work]),
        _microseconds(lambda: runner._graph(adapted, work)),
        _quartiles(hooks),
        _quartiles(adapters),
        counts,
    )


def _block(engine: Engine) -> float:
    """Seconds of processor time of some steps."""
    began = process_time()
    for _ in range(_BLOCK):
        engine.step()
    return process_time() - began


def _instructions(engine: Engine) -> float:
    """Bytecode instructions of a plain step: the least of some, as others begin a page or seal one."""
    count, counts = 0, []

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        for _ in range(_BLOCK):
            before = count
            engine.step()
            counts.append(count - before)
    finally:
        sys.settrace(None)
    return min(counts)


_PARTS = ModelRunner._parts


def _one_part(runner: ModelRunner, work: list[Work]) -> list[list[Work]]:
    return [work]


def _with_parts(engine: Engine, parts: Callable[..., list[list[Work]]], measured: Callable[[Engine], float] = _block) -> float:
    """Replaced in either case, also by itself: Python's caches for a class begin anew when it changes."""
    with patch.object(ModelRunner, "_parts", parts):
        return measured(engine)


def _without_adapters(engine: Engine, measured: Callable[[Engine], float] = _block) -> float:
    adapted: AdaptedModel | None = engine.runner.adapted
    engine.adapt(None)
    try:
        return measured(engine)
    finally:
        engine.adapt(adapted)


def _ratio(asking: Callable[[], float], silent: Callable[[], float], pair: int) -> float:
    """What the first takes more than the second, relative to it; which of them begins changes from pair to pair."""
    if pair % 2:
        less, more = silent(), asking()
    else:
        more, less = asking(), silent()
    return more / less - 1


def _microseconds(call: Callable[[], object]) -> float:
    """Of one call, the call itself included: the least of five means."""
    means = []
    for _ in range(5):
        began = thread_time()
        for _ in range(_CALLS):
            call()
        means.append((thread_time() - began) / _CALLS * 1e6)
    return min(means)


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return low, middle, high


def write_adapter(model: Path | str, folder: Path, seed: int) -> Path:
    """A LoRA of PEFT's format for all projections of a model's attention and feed-forward layers, with random numbers. Raises
    `MLXInferError`."""
    from mlxinfer.loading.find.resolve import resolve
    from mlxinfer.loading.load import open_checkpoint

    with ExitStack() as stack:
        checkpoint = open_checkpoint(resolve(model).path)
        stack.callback(checkpoint.close)
        config = dict(checkpoint.config)
    hidden, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    attention = {"q_proj": (hidden, queries), "k_proj": (hidden, keys), "v_proj": (hidden, keys), "o_proj": (queries, hidden)}
    fed = {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}
    chance, tensors = np.random.default_rng(seed), {}
    for layer in range(layers):
        for part, sizes in (("self_attn", attention), ("mlp", fed)):
            for name, (inputs, outputs) in sizes.items():
                place = f"base_model.model.model.layers.{layer}.{part}.{name}"
                for letter, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
                    tensors[f"{place}.lora_{letter}.weight"] = mx.array(chance.normal(0, 0.02, shape).astype(np.float32))
    folder.mkdir(parents=True)
    mx.save_safetensors(str(folder / "adapter_model.safetensors"), tensors)
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": [*attention, *fed], "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def table(found: list[Unused]) -> str:
    """Markdown."""
    lines = [
        "| streams | a step, ms | asking for hooks | share | steps that ask, against steps that do not |"
        " asking for adapters | share | steps, adapters loaded against none |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for each in found:
        cells = [str(each.streams), f"{each.step_ms:.2f}"]
        for took, ratio in ((each.hooks_us, each.hooks), (each.adapters_us, each.adapters)):
            low, middle, high = (f"{100 * value:+.2f}%" for value in ratio)
            cells += [f"{took:.2f} µs", f"{took / 10 / each.step_ms:.3f}%", f"{middle} ({low} to {high})"]
        lines.append(f"| {' | '.join(cells)} |")
    for each in found:
        whole, no_adapters, no_hooks = each.instructions
        lines += ["", f"Bytecode instructions of a step of {each.streams}: {whole:g}; for hooks {whole - no_hooks:g} of them "]
        lines[-1] += f"({(whole - no_hooks) / whole:.2%}), for adapters {whole - no_adapters:g} ({(whole - no_adapters) / whole:.2%})."
    return "\n".join(lines) + "\n"
