"""Recording of an engine's steps: rows per request, and times of start, first token and end."""

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
from .frames import frame
from .html import table

if TYPE_CHECKING:
    from ..engine.core.sequence import Sequence
    from ..engine.llm import LLM


@dataclass(frozen=True, slots=True)
class StepShare:
    """Part of one request in one step."""

    step: int
    """Index of the step, from 0."""
    request: int
    """Index of the request by creation, from 0; each sample of a prompt counts."""
    began: float
    """Earliest start of the step on the device, in seconds since the recording started."""
    ended: float
    """Time at which the results were read."""
    prompt: int
    """Prompt tokens read in the step."""
    answer: int
    """Rows of the answer: one, plus one per verified draft."""
    tokens: int
    """Tokens added to the answer; fewer than rows if drafts were rejected."""


@dataclass(frozen=True, slots=True)
class TimelineRequest:
    """Course of one request."""

    prompt_tokens: int
    """Prompt tokens."""
    reused: int
    """Prompt tokens reused from the prefix cache."""
    added: float
    """Creation, in seconds since the recording started; negative for earlier requests."""
    started: float
    """Time of admission."""
    first_token: float
    """Time of the first token; 0 without one."""
    last_token: float
    """Time of the last token; 0 without one."""
    answer_tokens: int
    """Answer tokens."""
    finish_reason: str
    """Reason for the end; "" if the request outlived the recording."""
    preemptions: int
    """Number of preemptions."""


class Timeline:
    """Steps of a recording; `rows` and `requests` are complete after its block."""

    def __init__(self, began: float) -> None:
        self.rows: list[StepShare] = []
        """Parts by step, and within a step in the scheduler's order."""
        self.waiting: list[tuple[float, int]] = []
        """(end of a step in seconds, number of waiting requests)."""
        self._began = began
        self._sequences: dict[int, Sequence] = {}
        self._steps = 0

    def note(self, report: StepReport) -> None:
        """Add the engine's report of a step."""
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
            self.rows.append(StepShare(self._steps, id(sequence), began, ended, prompt, answer, got.get(id(sequence), 0)))
        self.waiting.append((ended, report.waiting))
        self._steps += 1

    def close(self) -> None:
        """Number the requests by creation."""
        ordered = sorted(self._sequences.values(), key=lambda s: s.times.added)
        numbers = {id(sequence): number for number, sequence in enumerate(ordered)}
        self.rows = [replace(row, request=numbers[row.request]) for row in self.rows]
        self._sequences = dict(enumerate(ordered))

    @property
    def steps(self) -> int:
        """Number of computed steps."""
        return self._steps

    @property
    def requests(self) -> list[TimelineRequest]:
        """Course of each request, by index."""
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
        """Return a `pandas.DataFrame` with a row per request and step. Raises `MLXInferError` without pandas."""
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
    """Record the engine inside of a block: `with recorded(llm) as timeline: llm.generate(prompts)`.

    Outside of a block this costs one comparison per step. Raises `MLXInferError` for an `AsyncLLM`, and inside another recording.
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
