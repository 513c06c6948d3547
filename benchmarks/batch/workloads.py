"""The measurements. Each is a generator of the samples of one engine in one round."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from ..common.process import Process
from ..common.samples import SECONDS, TOKENS_PER_S, Sample
from .texts import QUESTIONS, STORIES, STORY, Messages, edits, passage

OURS, UNDRAFTED, DETERMINISTIC = "mlxinfer", "mlxinfer-undrafted", "mlxinfer-deterministic"
SETTINGS: dict[str, dict[str, Any]] = {
    OURS: {},
    UNDRAFTED: {"speculate": False},
    DETERMINISTIC: {"speculate": False, "deterministic": True},
}
LLAMA, MLX_LM, LLAMA_SERVER, MLX_SERVER = "llama.cpp", "mlx-lm", "llama-server", "mlx-lm-server"

TOKENS, RATE = "tokens", "of 1"
ALONE, BESIDE, FIRST_BESIDE = "a stream alone", "a stream beside a long prompt", "first token of that prompt"
COLD, WARM, DISK = "first token, cold", "first token, warm", "first token, from disk"
EDIT, FREE = "repeats its input", "free text"

_DEPTH = 8
_DISK_GB = 2.0
_TURN_TOKENS = 8
_SYSTEM_TOKENS = 512
_STEPS_OF_A_SLOW_ENGINE = 32
"""A slow engine gets this many times fewer tokens per stream than its prompt limit."""
_EDIT_TOKENS, _FREE_TOKENS = 400, 200
_FREE_TEMPERATURE = 0.8
_ALONE_S = 1.0
_NUMBERS = 10
"""Passages per round."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Lengths in tokens: `prompt` of the long prompt, `steps` of each of many streams."""

    prompt: int = 4096
    steps: int = 128
    streams: tuple[int, ...] = (1, 2, 4, 8, 16)
    turns: int = len(QUESTIONS)

    def limited(self, most: int | None) -> Plan:
        if most is None:
            return self
        return replace(self, prompt=min(self.prompt, most), steps=min(self.steps, max(most // _STEPS_OF_A_SLOW_ENGINE, 1)))

    @property
    def context(self) -> int:
        return max(self.prompt, _SYSTEM_TOKENS + 64 * self.turns) + 1024


@dataclass(frozen=True, slots=True)
class Case:
    """One engine in one round. `another` starts a second process of the same engine with additional settings, loaded and warm."""

    model: str
    engine: str
    round: int
    plan: Plan
    process: Process
    another: Callable[..., AbstractContextManager[Process]]
    tokenizer: Any

    def sample(
        self, work: str, value: float, unit: str, answer: dict[str, Any], length: int = 0, streams: int = 1, steps: int = 1
    ) -> Sample:
        kept = {key: answer.get(key, 0.0) for key in ("others", "idle_cpu_s")}
        return Sample(self.model, work, self.engine, self.round, length, streams, steps, value, unit, **kept)

    def passage(self, number: int) -> str:
        """A passage that differs in every round, so no engine has it in its cache."""
        return passage(self.tokenizer, self.plan.prompt, self.round * _NUMBERS + number)


def together(case: Case) -> Iterator[Sample]:
    """Tokens per second of 1, 2, ... streams, added up."""
    for streams in case.plan.streams if case.engine != DETERMINISTIC else [n for n in case.plan.streams if n in (1, 8)]:
        answer = case.process.ask("decode", depth=_DEPTH, streams=streams, steps=case.plan.steps)
        rate = streams * case.plan.steps / answer["seconds"]
        yield case.sample(streams_name(streams), rate, TOKENS_PER_S, answer, _DEPTH, streams, case.plan.steps)


def streams_name(streams: int) -> str:
    return f"{streams} stream{'s' * (streams > 1)}"


def beside(case: Case) -> Iterator[Sample]:
    answer = case.process.ask("beside", prompt=STORY, long=case.passage(0), alone_s=_ALONE_S)
    for work, key, unit in ((ALONE, "alone", TOKENS_PER_S), (BESIDE, "beside", TOKENS_PER_S), (FIRST_BESIDE, "first_s", SECONDS)):
        yield case.sample(work, answer[key], unit, answer, case.plan.prompt)


def prefix(case: Case) -> Iterator[Sample]:
    """Ask two questions about the same long text."""
    text = case.passage(1)
    for work, question in ((COLD, QUESTIONS[0]), (WARM, QUESTIONS[3])):
        answer = case.process.ask("answer", prompt=f"{text}\n\n{question}", tokens=2)
        yield case.sample(work, answer["first_s"], SECONDS, answer, case.plan.prompt)
        yield case.sample(f"{work}: tokens read", answer["prompt_tokens"] - answer["reused_tokens"], TOKENS, answer, case.plan.prompt)


def disk(case: Case) -> Iterator[Sample]:
    """Ask two questions about the same long text in two processes, one after the other."""
    text = case.passage(2)
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {"saved": folder} if case.engine == LLAMA_SERVER else {"prefix_disk_gb": _DISK_GB, "prefix_dir": folder}
        with case.another(**settings) as process:
            process.ask("answer", prompt=f"{text}\n\n{QUESTIONS[0]}", tokens=2)
            process.ask("save")
            process.ask("close")
        with case.another(**settings) as process:
            answer = process.ask("restored", prompt=f"{text}\n\n{QUESTIONS[3]}", tokens=2)
            process.ask("close")
    yield case.sample(DISK, answer["first_s"], SECONDS, answer, case.plan.prompt)
    yield case.sample(f"{DISK}: tokens read", answer["prompt_tokens"] - answer["reused_tokens"], TOKENS, answer, case.plan.prompt)


def conversation(case: Case) -> Iterator[Sample]:
    """For each turn: the tokens that it adds, those that the engine reads, and the time to the first token."""
    text = passage(case.tokenizer, min(_SYSTEM_TOKENS, case.plan.prompt), case.round * _NUMBERS + 3)
    messages: Messages = [{"role": "system", "content": text}]
    known = 0
    for turn, question in enumerate(QUESTIONS[: case.plan.turns], start=1):
        messages.append({"role": "user", "content": question})
        answer = case.process.ask("answer", prompt=messages, tokens=_TURN_TOKENS)
        length = answer["prompt_tokens"]
        for what, value, unit in (
            ("new", length - known, TOKENS),
            ("read", length - answer["reused_tokens"], TOKENS),
            ("first token", answer["first_s"], SECONDS),
        ):
            yield case.sample(turn_name(turn, what), value, unit, answer, length)
        # The engine has not read the last token of its answer yet.
        known = length + answer["answer_tokens"] - 1
        messages.append({"role": "assistant", "content": answer["text"]})


def turn_name(turn: int, what: str) -> str:
    return f"turn {turn}: {what}"


def drafts(case: Case) -> Iterator[Sample]:
    """Repeat code with a change, greedily, and write stories, sampled: 1 and 4 at once. The second run counts, with cached prompts."""
    kinds = ((EDIT, edits(), _EDIT_TOKENS, 0.0), (FREE, list(STORIES), _FREE_TOKENS, _FREE_TEMPERATURE))
    for kind, prompts, tokens, temperature in kinds:
        for streams in (1, len(prompts)):
            job = {"prompts": prompts[:streams], "tokens": tokens, "temperature": temperature}
            case.process.ask("write", **job)
            answer = case.process.ask("write", **job)
            name = f"{kind}, {streams_name(streams)}"
            yield case.sample(name, answer["tokens"] / answer["seconds"], TOKENS_PER_S, answer, 0, streams, tokens)
            yield case.sample(f"{name}: the answer", answer["checksum"], "checksum", answer, 0, streams, tokens)
            if answer["drafted"]:
                yield case.sample(f"{name}: accepted", answer["accepted"] / answer["drafted"], RATE, answer, 0, streams, tokens)


@dataclass(frozen=True, slots=True)
class Work:
    name: str
    engines: tuple[str, ...]
    measure: Callable[[Case], Iterator[Sample]]


SERVERS = (OURS, LLAMA_SERVER, MLX_SERVER)
WORKS = (
    Work("streams", (UNDRAFTED, LLAMA, MLX_LM, DETERMINISTIC), together),
    Work("beside", SERVERS, beside),
    Work("prefix", SERVERS, prefix),
    Work("disk", (OURS, LLAMA_SERVER), disk),
    Work("conversation", SERVERS, conversation),
    Work("drafts", (OURS, UNDRAFTED), drafts),
)
ENGINES = tuple(dict.fromkeys(engine for work in WORKS for engine in work.engines))
