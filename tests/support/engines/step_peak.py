"""The most memory that a step of an engine takes."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx

from mlxinfer.config import EngineArgs
from mlxinfer.engine.core.engine import Engine
from mlxinfer.engine.core.sequence import Sequence
from mlxinfer.engine.open_model import engine_config
from mlxinfer.types import SamplingParams

from ..processes.active_memory import active_memory

ALL_STAGES = SamplingParams(
    temperature=0.8,
    top_k=40,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    logit_bias={3: 1.0},
    logprobs=5,
    ignore_eos=True,
)


def measured_peak(planned, plan, *, prompt: int, streams: int, length: int = 40) -> int:
    """The most that a step takes beside what is there after it or was before it: of a long prompt, then of many answers that repeat
    themselves, so that tokens are drafted."""
    engine = Engine(planned.model, engine_config(EngineArgs("tiny"), plan), dtype=planned.dtype)
    same = replace(ALL_STAGES, logit_bias={5: 100.0})
    worst = worst_step(engine, [Sequence([3 + i % 80 for i in range(prompt)], ALL_STAGES, seed=0, max_length=prompt + 4)])
    return max(worst, worst_step(engine, [Sequence([4 + i, 5, 5], same, seed=i, max_length=length) for i in range(streams)]))


def worst_step(engine, sequences) -> int:
    worst = 0
    for sequence in sequences:
        engine.add(sequence)
    while not engine.idle:
        before = active_memory()
        mx.reset_peak_memory()
        engine.step()
        worst = max(worst, mx.get_peak_memory() - max(before, active_memory()))
    return worst
