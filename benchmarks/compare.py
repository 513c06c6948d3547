"""Measures all engines in turn, round by round, so that other load on the machine affects all of them alike."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from .process import Process, WorkerError
from .samples import BYTES, MACHINE, SECONDS, TOKENS_PER_S, Sample
from .system import ROOT
from .workloads import FIRST_NAME, MEMORY_NAME, ONE_AT_A_TIME, OURS, OURS_FIRST, PROMPT, START, START_NAME, Work, context_of

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Settings:
    """`limits` are the longest prompts in tokens that an engine gets; results state them."""

    engines: tuple[str, ...]
    works: tuple[Work, ...]
    rounds: int
    threads: int
    limits: dict[str, int] = field(default_factory=dict)
    start: bool = True


class Comparison:
    """One model in all engines. `about` is filled as they start."""

    def __init__(self, name: str, path: Path, settings: Settings, tell: Tell, start: Callable[[str, int], Process] = Process) -> None:
        self.name = name
        self.path = path
        self.settings = settings
        self.about: dict[str, Any] = {}
        self.left_out: dict[str, str] = {}
        self._tell = tell
        self._process = start
        self._workers: dict[str, Process] = {}
        self._models: dict[str, str] = {}
        self._costs: dict[Work, dict[str, float]] = {}

    def run(self) -> Iterator[Sample]:
        """All rounds. Raises `WorkerError` if an engine fails after it could start."""
        with ExitStack() as stack:
            self._models = self._prepare(stack)
            for engine in self.settings.engines:
                self._start(engine, stack)
            if not self._workers:
                raise WorkerError("; ".join(self.left_out.values()))
            machine = stack.enter_context(self._process(MACHINE, self.settings.threads))
            for number in range(1, self.settings.rounds + 1):
                yield from self._machine_samples(machine, number)
                for turn, work in enumerate(self.settings.works):
                    yield from self._work_samples(work, number, turn)
                if self.settings.start:
                    for engine in self._order(number):
                        yield from self._start_samples(engine, number)

    def _prepare(self, stack: ExitStack) -> dict[str, str]:
        """The path of the model for each engine: all but mlx-lm read the file itself."""
        models = dict.fromkeys(self.settings.engines, str(self.path))
        if ONE_AT_A_TIME in models and self.path.is_file():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / self.name
            self._tell("converting for mlx-lm")
            # MLX's CPU operations are fastest in float32.
            command = [sys.executable, "-m", "mlxinfer", "convert", str(self.path), str(folder), "--dtype", "float32", "--no-measure"]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            if done.returncode:
                raise WorkerError(done.stderr.strip())
            models[ONE_AT_A_TIME] = str(folder)
        return models

    def _start(self, engine: str, stack: ExitStack) -> None:
        worker = stack.enter_context(self._process(engine, self.settings.threads))
        try:
            text = self._load(worker, context_of((*self.settings.works, START)))["text"]
        except WorkerError as error:
            self.left_out[engine] = str(error)
            self._tell(f"left out: {error}")
            return
        self._workers[engine] = worker
        self.about[engine] = worker.ask("about") | {"first_token": text}

    def _load(self, worker: Process, context: int, model: str | None = None) -> dict[str, Any]:
        return worker.ask("load", model=model or self._models[worker.engine], threads=self.settings.threads, context=context, prompt=PROMPT)

    def _order(self, turn: int) -> list[str]:
        """The engines, with another one first in each round."""
        names = list(self._workers)
        start = turn % len(names)
        return names[start:] + names[:start]

    def _machine_samples(self, machine: Process, number: int) -> Iterator[Sample]:
        found = machine.ask("machine", bytes=self._bytes_to_read())
        for work, key, unit in (
            ("read", "read_bytes", "bytes/s"),
            ("copy", "copy_bytes", "bytes/s"),
            ("multiply-add", "operations", "operations/s"),
        ):
            yield Sample(
                self.name, work, MACHINE, number, 0, 0, 0, found[key], unit, others=found["others"], idle_cpu_s=found["idle_cpu_s"]
            )

    def _bytes_to_read(self) -> int:
        """Bytes that a decode step reads here, or the size of the file."""
        ours = self.about.get(OURS)
        return int(ours["weight_bytes"]) if ours else sum(f.stat().st_size for f in [self.path, *self.path.glob("*")] if f.is_file())

    def _work_samples(self, work: Work, number: int, turn: int) -> Iterator[Sample]:
        for engine in self._order(number + turn):
            if not work.suits(engine):
                continue
            limited = work.limited(self.settings.limits.get(engine))
            self._tell(f"round {number} of {self.settings.rounds}, {self.name}: {work.name}, {engine}")
            try:
                answer = self._workers[engine].ask(limited.kind, **limited.job())
            except WorkerError as error:
                if work.kv == 16:
                    raise
                self._tell(f"no such cache: {error}")
                continue
            rate = (limited.tokens or limited.streams * limited.steps) / answer["seconds"]
            place = (number, limited.tokens or limited.depth, limited.streams, limited.steps)
            kept = {key: answer[key] for key in ("others", "idle_cpu_s")}
            yield Sample(self.name, work.name, engine, *place, rate, TOKENS_PER_S, *self._cost(limited, engine), **kept)

    def _cost(self, work: Work, engine: str) -> tuple[float, float]:
        """Bytes and operations: the operations are equal for all, the bytes are those of the engine's own weights and cache."""
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
        """A whole process: the time from its start to the first token, and its peak memory after some more work."""
        work = START.limited(self.settings.limits.get(engine))
        self._tell(f"round {number} of {self.settings.rounds}, {self.name}: {START_NAME}, {engine}")
        first = OURS_FIRST if engine == OURS else engine
        if first != engine:
            with self._process(first, self.settings.threads) as worker:
                loaded = self._load(worker, context_of((work,)), self._models[engine])
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
