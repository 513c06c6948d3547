"""The measurements of `compare`, round by round."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from ..common.process import Process, WorkerError
from ..common.samples import BYTES, MACHINE, SECONDS, TOKENS_PER_S, Sample
from ..common.study import Study, Tell
from .workloads import FIRST_NAME, MEMORY_NAME, OURS, OURS_FIRST, PROMPT, START, START_NAME, Work, context_of


@dataclass(frozen=True, slots=True)
class Settings:
    engines: tuple[str, ...]
    works: tuple[Work, ...]
    rounds: int
    threads: int
    limits: dict[str, int] = field(default_factory=dict)
    start: bool = True


class Comparison(Study):
    """The measurements of `compare`. An engine that fails after its start ends the run."""

    def __init__(self, name: str, path: Path, settings: Settings, tell: Tell, process: Callable[[str, int], Process] = Process) -> None:
        super().__init__(name, path, settings, tell, process)
        self._costs: dict[Work, dict[str, float]] = {}

    def run(self) -> Iterator[Sample]:
        with ExitStack() as stack:
            self.start(self.settings.engines, stack)
            machine = stack.enter_context(self._process(MACHINE, self.settings.threads))
            for number in range(1, self.settings.rounds + 1):
                yield from self._machine_samples(machine, number)
                for turn, work in enumerate(self.settings.works):
                    yield from self._work_samples(work, number, turn)
                if self.settings.start:
                    for engine in self.order(number, self.settings.engines):
                        yield from self._start_samples(engine, number)

    def load(self, worker: Process, **settings: Any) -> dict[str, Any]:
        text = self._load(worker, context_of((*self.settings.works, START)))["text"]
        return worker.ask("about") | {"first_token": text}

    def _load(self, worker: Process, context: int, engine: str = "") -> dict[str, Any]:
        model = self.model_of(engine or worker.engine)
        return worker.ask("load", model=model, threads=self.settings.threads, context=context, prompt=PROMPT)

    def _machine_samples(self, machine: Process, number: int) -> Iterator[Sample]:
        found = machine.ask("machine", bytes=self._bytes_to_read())
        used = {key: found[key] for key in ("others", "idle_cpu_s")}
        for work, key, unit in (
            ("read", "read_bytes", "bytes/s"),
            ("copy", "copy_bytes", "bytes/s"),
            ("multiply-add", "operations", "operations/s"),
        ):
            yield Sample(self.name, work, MACHINE, number, 0, 0, 0, found[key], unit, **used)

    def _bytes_to_read(self) -> int:
        """Bytes that a decode step of this project reads, or the size of the file."""
        ours = self.about.get(OURS)
        return int(ours["weight_bytes"]) if ours else sum(f.stat().st_size for f in [self.path, *self.path.glob("*")] if f.is_file())

    def _work_samples(self, work: Work, number: int, turn: int) -> Iterator[Sample]:
        for engine in self.order(number + turn, self.settings.engines):
            if not work.suits(engine):
                continue
            limited = work.limited(self.settings.limits.get(engine))
            self._tell(f"round {number} of {self.settings.rounds}, {self.name}: {work.name}, {engine}")
            try:
                answer = self._workers[engine].ask(limited.kind, **limited.job())
            except WorkerError as error:
                if work.kv == 16:
                    raise
                self._tell(f"not available: {error}")
                continue
            rate = (limited.tokens or limited.streams * limited.steps) / answer["seconds"]
            place = (number, limited.tokens or limited.depth, limited.streams, limited.steps)
            kept = {key: answer[key] for key in ("others", "idle_cpu_s")}
            yield Sample(self.name, work.name, engine, *place, rate, TOKENS_PER_S, *self._cost(limited, engine), **kept)

    def _cost(self, work: Work, engine: str) -> tuple[float, float]:
        """Bytes of the engine's weights and cache, and operations, which are the same for all engines."""
        if OURS not in self._workers:
            return 0.0, 0.0
        if work not in self._costs:
            depth = work.depth + work.steps // 2
            self._costs[work] = self._workers[OURS].ask("cost", tokens=work.tokens, depth=depth, streams=work.streams)
        if work.kv != 16:
            return 0.0, 0.0
        cost, mine, theirs = self._costs[work], self.about[OURS], self.about[engine]
        if "operations" not in cost:
            return 0.0, 0.0
        weights = cost["weight_bytes"] * theirs["weight_bytes"] / mine["weight_bytes"]
        cache = cost["cache_bytes"] * theirs["cache_item_bytes"] / mine["cache_item_bytes"]
        return weights + cache, cost["operations"]

    def _start_samples(self, engine: str, number: int) -> Iterator[Sample]:
        """Measure a whole process: the time to the first token, and the peak memory after more work."""
        work = START.limited(self.settings.limits.get(engine))
        self._tell(f"round {number} of {self.settings.rounds}, {self.name}: {START_NAME}, {engine}")
        first = OURS_FIRST if engine == OURS else engine
        if first != engine:
            with self._process(first, self.settings.threads) as worker:
                loaded = self._load(worker, context_of((work,)), engine)
                seconds = perf_counter() - worker.started
            yield Sample(self.name, FIRST_NAME, engine, number, 0, 1, 0, seconds, SECONDS, others=loaded["others"])
        with self._process(engine, self.settings.threads) as worker:
            loaded = self._load(worker, context_of((work,)))
            seconds = perf_counter() - worker.started
            worker.ask("prefill", tokens=work.tokens)
            worker.ask("decode", depth=0, streams=1, steps=work.steps)
            peak = worker.ask("memory")["peak_rss_bytes"]
        for name in [START_NAME] if first != engine else [START_NAME, FIRST_NAME]:
            yield Sample(self.name, name, engine, number, 0, 1, 0, seconds, SECONDS, others=loaded["others"])
        yield Sample(self.name, MEMORY_NAME, engine, number, work.tokens, 1, work.steps, peak, BYTES)
