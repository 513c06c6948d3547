"""The measurements. Each is a generator of the samples of one engine in one round."""

from __future__ import annotations

from collections.abc import Iterator

from ..batch.texts import STORIES
from ..batch.workloads import LLAMA_SERVER, MLX_SERVER, OURS, Case, Work
from ..common.samples import SECONDS, Sample

ENGINE = "mlxinfer-engine"
"""The engine without a server."""
SERVERS = (OURS, LLAMA_SERVER, MLX_SERVER)
ENGINES = (ENGINE, *SERVERS)
BYTE, FIRST = "first byte, warm", "first token, warm"
REQUESTS_PER_S = "requests/s"

CONNECTIONS = 8
SHORT = f"short requests, {CONNECTIONS} connections"
_SHORT_TOKENS = 4
_CONNECTING = 5
"""Repetitions; the median counts."""
_PAIRS = 10


def step_name(streams: int) -> str:
    return f"step of {streams} stream{'s' * (streams > 1)}"


def bare_name(streams: int) -> str:
    return f"{step_name(streams)}, bare"


def served_name(streams: int) -> str:
    return f"{step_name(streams)}, served"


def _prompts(streams: int) -> list[str]:
    return [f"{number}. {STORIES[number % len(STORIES)]}" for number in range(streams)]


def steps(case: Case) -> Iterator[Sample]:
    """Seconds from one token of a stream to the next."""
    for streams in case.plan.streams:
        prompts = _prompts(streams)
        case.process.ask("step", prompts=prompts, steps=2)  # the prompts are in the cache now
        answer = case.process.ask("step", prompts=prompts, steps=case.plan.steps)
        yield case.sample(step_name(streams), answer["seconds"], SECONDS, answer, 0, streams, case.plan.steps)


def pairs(case: Case) -> Iterator[Sample]:
    """A step of the engine and the same step through the server, alternating, both in one process."""
    for streams in case.plan.streams:
        answer = case.process.ask("pairs", prompts=_prompts(streams), steps=case.plan.steps, pairs=_PAIRS)
        for bare, served in answer["pairs"]:
            yield case.sample(bare_name(streams), bare, SECONDS, answer, 0, streams, case.plan.steps)
            yield case.sample(served_name(streams), served, SECONDS, answer, 0, streams, case.plan.steps)


def connecting(case: Case) -> Iterator[Sample]:
    prompt = case.passage(0)
    answer = case.process.ask("connect", prompt=prompt, times=_CONNECTING)
    yield case.sample(BYTE, answer["byte"], SECONDS, answer, case.plan.prompt)
    yield case.sample(FIRST, answer["first"], SECONDS, answer, case.plan.prompt)


def short(case: Case) -> Iterator[Sample]:
    """Send as many requests as a stream has steps."""
    prompts = [f"{number}: the capital of country {case.round * number} is" for number in range(max(case.plan.steps, CONNECTIONS))]
    answer = case.process.ask("short", prompts=prompts, connections=CONNECTIONS, tokens=_SHORT_TOKENS)
    yield case.sample(SHORT, len(prompts) / answer["seconds"], REQUESTS_PER_S, answer, 0, CONNECTIONS, _SHORT_TOKENS)


WORKS = (
    Work("pairs", (ENGINE,), pairs),
    Work("steps", ENGINES, steps),
    Work("connecting", ENGINES, connecting),
    Work("short", ENGINES, short),
)
