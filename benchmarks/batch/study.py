"""Runs all works with all engines, round by round."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxinfer.loading.load import load_tokenizer, open_checkpoint

from ..common.process import Process, WorkerError
from ..common.samples import Sample
from ..common.study import Study, Tell
from ..compare.workloads import PROMPT
from .workloads import ENGINES, LLAMA, MLX_LM, SETTINGS, WORKS, Case, Plan, Work


def start(engine: str, threads: int) -> Process:
    """Start a worker. Two engines are those of `compare`, without a server."""
    own = engine not in (LLAMA, MLX_LM)
    return Process(engine, threads, command=[sys.executable, "-m", "benchmarks.batch.worker", engine] if own else None)


@dataclass(frozen=True, slots=True)
class Settings:
    rounds: int
    threads: int
    plan: Plan = field(default_factory=Plan)
    works: tuple[Work, ...] = WORKS
    engines: tuple[str, ...] = ENGINES
    limits: dict[str, int] = field(default_factory=dict)


class BatchStudy(Study):
    """The measurements of `batch`. An engine that fails is left out from then on."""

    def __init__(self, name: str, path: Path, settings: Settings, tell: Tell, process: Callable[[str, int], Process] = start) -> None:
        super().__init__(name, path, settings, tell, process)

    def run(self) -> Iterator[Sample]:
        used = {engine for work in self.settings.works for engine in work.engines}
        with ExitStack() as stack:
            tokenizer = load_tokenizer(stack.enter_context(closing(open_checkpoint(self.path))))
            self.start([engine for engine in self.settings.engines if engine in used], stack)
            for number in range(1, self.settings.rounds + 1):
                for turn, work in enumerate(self.settings.works):
                    for engine in self.order(number + turn, work.engines):
                        self._tell(f"round {number} of {self.settings.rounds}, {self.name}: {work.name}, {engine}")
                        yield from self._samples(work, engine, number, tokenizer)

    def load(self, worker: Process, **settings: Any) -> dict[str, Any]:
        """Load the model and warm up."""
        engine = worker.engine
        job = {"model": self.model_of(engine), "threads": self.settings.threads, "context": self._plan(engine).context}
        if engine in (LLAMA, MLX_LM):
            worker.ask("load", **job, prompt=PROMPT)
            return {"version": worker.ask("about")["version"]}
        found = worker.ask("load", **job, **SETTINGS.get(engine, {}), **settings)
        worker.ask("answer", prompt=PROMPT, tokens=4)
        return {"version": found["version"]}

    def _plan(self, engine: str) -> Plan:
        plan: Plan = self.settings.plan.limited(self.settings.limits.get(engine))
        return plan

    def _samples(self, work: Work, engine: str, number: int, tokenizer: Any) -> Iterator[Sample]:
        @contextmanager
        def another(**settings: Any) -> Iterator[Process]:
            with self._process(engine, self.settings.threads) as process:
                self.load(process, **settings)
                yield process

        case = Case(self.name, engine, number, self._plan(engine), self._workers[engine], another, tokenizer)
        try:
            yield from work.measure(case)
        except WorkerError as error:
            self.leave_out(engine, f"{work.name}: {error}")
