"""What an engine did, step by step: which request got how many rows, when each began, wrote its first token, and ended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from ..engine.core.events import StepReport, Token
from ..errors import MLXInferError
from ..util.dataclass import dataclass
from ..util.words import counted
from .cache_map import engine_of
from .formats import table
from .frames import frame

if TYPE_CHECKING:
    from ..engine.core.sequence import Sequence
    from ..engine.llm import LLM


@dataclass(frozen=True, slots=True)
class Rows:
    """The part of one request in one step."""

    step: int
    """Which step, from 0."""
    request: int
    """Which request, in the order in which they were made, from 0; samples of one prompt count each."""
    began: float
    """When the device could begin with the step, in seconds since the recording began."""
    ended: float
    """When its results were read."""
    prompt: int
    """Tokens of the prompt that it read."""
    answer: int
    """Rows that brought the answer on: one, and one for each draft that was verified."""
    tokens: int
    """Tokens that the answer got: fewer than rows where drafts were wrong."""


@dataclass(frozen=True, slots=True)
class TimelineRequest:
    """What became of one request."""

    prompt_tokens: int
    """Tokens of its prompt."""
    reused: int
    """Tokens of these that the prefix cache had."""
    added: float
    """When it was made, in seconds since the recording began; negative for one made before."""
    started: float
    """When it got its place."""
    first_token: float
    """When its first token was read; 0 without one."""
    last_token: float
    """When its latest token was read; 0 without one."""
    answer_tokens: int
    """Tokens of its answer."""
    finish_reason: str
    """Why it ended; empty where it still ran when the recording ended."""
    preemptions: int
    """How often it gave its pages to others."""


class Timeline:
    """All steps of a recording. `rows` and `requests` are complete when its block has ended."""

    def __init__(self, began: float) -> None:
        self.rows: list[Rows] = []
        """By step, and within one as the scheduler chose them."""
        self.waiting: list[tuple[float, int]] = []
        """When a step ended, in seconds, and how many requests had no place then."""
        self._began = began
        self._sequences: dict[int, Sequence] = {}
        self._steps = 0

    def note(self, report: StepReport) -> None:
        """Take what the engine tells of a step."""
        got: dict[int, int] = {}
        for event in report.events:
            if isinstance(event, Token):
                got[id(event.sequence)] = got.get(id(event.sequence), 0) + 1
        began, ended = report.began - self._began, report.ended - self._began
        answers = report.schedule.decode_rows
        for work in report.schedule.work:
            sequence = work.sequence
            self._sequences[id(sequence)] = sequence
            answer = work.count if answers > 0 else 0
            answers -= work.count
            prompt = 0 if answer else work.count
            self.rows.append(Rows(self._steps, id(sequence), began, ended, prompt, answer, got.get(id(sequence), 0)))
        self.waiting.append((ended, report.waiting))
        self._steps += 1

    def close(self) -> None:
        """Number the requests by the time at which they were made."""
        ordered = sorted(self._sequences.values(), key=lambda s: s.times.added)
        numbers = {id(sequence): number for number, sequence in enumerate(ordered)}
        self.rows = [replace(row, request=numbers[row.request]) for row in self.rows]
        self._sequences = dict(enumerate(ordered))

    @property
    def steps(self) -> int:
        """Steps that were computed."""
        return self._steps

    @property
    def requests(self) -> list[TimelineRequest]:
        """What became of each request, in the order of their numbers."""
        return [self._request(sequence) for sequence in self._sequences.values()]

    def _request(self, sequence: Sequence) -> TimelineRequest:
        times = sequence.times
        added, started, first, last = (
            each - self._began if each else 0.0 for each in (times.added, times.started, times.first_token, times.last_token)
        )
        return TimelineRequest(
            prompt_tokens=len(sequence.prompt),
            reused=sequence.reused_tokens,
            added=added,
            started=started,
            first_token=first,
            last_token=last,
            answer_tokens=len(sequence.answer),
            finish_reason=sequence.finish_reason or "",
            preemptions=sequence.preemptions,
        )

    def to_pandas(self) -> Any:
        """A row for each request in each step, as a `pandas.DataFrame`. Raises `MLXInferError` without pandas."""
        return frame(asdict(row) for row in self.rows)

    def _lines(self) -> Iterator[tuple[str, ...]]:
        for number, each in enumerate(self.requests):
            prompt = f"{each.prompt_tokens}, {each.reused} of them cached" if each.reused else str(each.prompt_tokens)
            steps = sum(row.request == number for row in self.rows)
            yield str(number), prompt, str(each.answer_tokens), str(steps), each.finish_reason or "runs"

    def _repr_html_(self) -> str:
        return table(("request", "prompt", "answer", "steps", "ended"), self._lines())

    def __repr__(self) -> str:
        return f"Timeline({counted(self._steps, 'step')}, {counted(len(self._sequences), 'request')})"


@contextmanager
def recorded(llm: LLM) -> Iterator[Timeline]:
    """Record what the engine of a model does inside the block: `with recorded(llm) as timeline: llm.generate(prompts)`.

    Outside of such blocks it costs one comparison per step. Raises `MLXInferError` for an `AsyncLLM`, and inside another recording.
    """
    from time import perf_counter

    engine = engine_of(llm, "recorded")
    if engine.watch is not None:
        raise MLXInferError("this model is being recorded already")
    timeline = Timeline(perf_counter())
    engine.watch = timeline.note
    try:
        yield timeline
    finally:
        engine.watch = None
        timeline.close()
