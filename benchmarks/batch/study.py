"""All works with all engines, round by round, so that other load on the machine affects all of them alike."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxinfer.loading.load import load_tokenizer, open_checkpoint

from ..kv.quality import converted
from ..process import Process, WorkerError
from ..samples import Sample
from ..workloads import PROMPT
from .workloads import LLAMA, MLX_LM, MLX_SERVER, SETTINGS, WORKS, Case, Plan, Work

Tell = Callable[[str], None]


def start(engine: str, threads: int) -> Process:
    """Two engines are those of `compare`, and do not go through a server."""
    own = engine not in (LLAMA, MLX_LM)
    return Process(engine, threads, command=[sys.executable, "-m", "benchmarks.batch.worker", engine] if own else None)


@dataclass(frozen=True, slots=True)
class Settings:
    """`limits`: the longest prompt in tokens that an engine gets; results state it."""

    rounds: int
    threads: int
    plan: Plan = field(default_factory=Plan)
    works: tuple[Work, ...] = WORKS
    engines: tuple[str, ...] = tuple(dict.fromkeys(engine for work in WORKS for engine in work.engines))
    limits: dict[str, int] = field(default_factory=dict)


class Study:
    """One model. `about` and `left_out` are filled as engines start."""

    def __init__(self, name: str, path: Path, settings: Settings, tell: Tell, process: Callable[[str, int], Process] = start) -> None:
        self.name = name
        self.path = path
        self.settings = settings
        self.about: dict[str, Any] = {}
        self.left_out: dict[str, str] = {}
        self._tell = tell
        self._process = process
        self._workers: dict[str, Process] = {}
        self._models: dict[str, str] = {}

    def run(self) -> Iterator[Sample]:
        """All rounds. An engine that fails is left out from then on. Raises `WorkerError` if none can be started."""
        with ExitStack() as stack:
            checkpoint = open_checkpoint(self.path)
            stack.callback(checkpoint.close)
            tokenizer = load_tokenizer(checkpoint)
            for engine in self._wanted():
                self._start(engine, stack)
            if not self._workers:
                raise WorkerError("; ".join(self.left_out.values()))
            for number in range(1, self.settings.rounds + 1):
                for turn, work in enumerate(self.settings.works):
                    for engine in self._order(work, number + turn):
                        self._tell(f"round {number} of {self.settings.rounds}, {self.name}: {work.name}, {engine}")
                        yield from self._samples(work, engine, number, tokenizer)

    def _wanted(self) -> list[str]:
        used = {engine for work in self.settings.works for engine in work.engines}
        return [engine for engine in self.settings.engines if engine in used]

    def _start(self, engine: str, stack: ExitStack) -> None:
        try:
            if engine in (MLX_LM, MLX_SERVER) and MLX_LM not in self._models:
                self._tell("converting for mlx-lm")
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                self._models[MLX_LM] = self._models[MLX_SERVER] = str(converted(self.path, folder / self.name))
            worker = stack.enter_context(self._process(engine, self.settings.threads))
            self.about[engine] = self._load(worker)
        except WorkerError as error:
            self._leave_out(engine, str(error))
        else:
            self._workers[engine] = worker

    def _leave_out(self, engine: str, reason: str) -> None:
        self.left_out[engine] = reason
        self._workers.pop(engine, None)
        self._tell(f"left out: {reason}")

    def _load(self, worker: Process, **settings: Any) -> dict[str, Any]:
        """Load and warm up."""
        engine = worker.engine
        job = {"model": self._models.get(engine, str(self.path)), "threads": self.settings.threads, "context": self._plan(engine).context}
        if engine in (LLAMA, MLX_LM):
            worker.ask("load", **job, prompt=PROMPT)
            return {"version": worker.ask("about")["version"]}
        found = worker.ask("load", **job, **SETTINGS.get(engine, {}), **settings)
        worker.ask("answer", prompt=PROMPT, tokens=4)
        return {"version": found["version"]}

    def _plan(self, engine: str) -> Plan:
        return self.settings.plan.limited(self.settings.limits.get(engine))

    def _order(self, work: Work, turn: int) -> list[str]:
        """The engines, with another one first in each round."""
        names = [engine for engine in work.engines if engine in self._workers]
        first = turn % len(names) if names else 0
        return names[first:] + names[:first]

    def _samples(self, work: Work, engine: str, number: int, tokenizer: Any) -> Iterator[Sample]:
        @contextmanager
        def another(**settings: Any) -> Iterator[Process]:
            with self._process(engine, self.settings.threads) as process:
                self._load(process, **settings)
                yield process

        case = Case(self.name, engine, number, self._plan(engine), self._workers[engine], another, tokenizer)
        try:
            yield from work.measure(case)
        except WorkerError as error:
            self._leave_out(engine, f"{work.name}: {error}")
