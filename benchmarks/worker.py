"""One engine in a process of its own: takes jobs, one JSON object a line, from standard input, and answers each with one.

    {"do": "load", "model": ..., "threads": 2, "context": 4096, "prompt": "..."}    -> {"text": ...}
    {"do": "prefill", "tokens": 512}                                                -> {"seconds": ...}
    {"do": "decode", "depth": 0, "streams": 1, "steps": 64}                         -> {"seconds": ...}
    {"do": "about"}, {"do": "cost", ...}, {"do": "memory"}, {"do": "machine", "bytes": ...}

Failures are answered as {"error": ...}. Every answer has the processor time of the job (`cpu_s`; for the first, since the process
started), and that used between the previous answer and this job (`idle_cpu_s`), which reveals a worker that computes while another
one is measured.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from time import process_time
from typing import IO, Any, Protocol

from .engines import create
from .engines.base import Engine

Answer = dict[str, Any]
Open = Callable[[str], Engine]


class Doer(Protocol):
    def do(self, job: Mapping[str, Any]) -> Answer: ...

    def cpu_seconds(self) -> float:
        """Processor time used until now."""
        ...


class Worker:
    """Does jobs with one engine; the first job creates it, so that its start can be timed from outside."""

    def __init__(self, name: str, open_engine: Open = create) -> None:
        self._name = name
        self._open = open_engine
        self._engine: Engine | None = None

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            self._engine = self._open(self._name)
        return self._engine

    def do(self, job: Mapping[str, Any]) -> Answer:
        options = dict(job)
        kind = options.pop("do", None)
        if kind == "load":
            return {"text": self.engine.load(options.pop("model"), **options)}
        if kind in ("prefill", "decode"):
            return {"seconds": getattr(self.engine, kind)(**options)}
        if kind == "about":
            return asdict(self.engine.about())
        if kind == "cost":
            return dict(self.engine.cost(**options))
        if kind == "memory":
            from mlxinfer.util.device import peak_rss

            return {"peak_rss_bytes": peak_rss()}
        if kind == "machine":
            from mlxinfer.bench.machine import measure_machine

            return asdict(measure_machine(options["bytes"]))
        raise ValueError(f"no such job: {job!r}")

    def cpu_seconds(self) -> float:
        return process_time()


def serve(worker: Doer, jobs: IO[str], answers: IO[str]) -> None:
    """Answer jobs until there are no more."""
    begun = used = 0.0
    for line in jobs:
        if used:
            begun = worker.cpu_seconds()
        idle = begun - used
        try:
            answer = worker.do(json.loads(line))
        except Exception as error:  # noqa: BLE001  any failure of an engine belongs in the results
            answer = {"error": f"{type(error).__name__}: {error}"}
        used = worker.cpu_seconds()
        answers.write(json.dumps(answer | {"cpu_s": used - begun, "idle_cpu_s": idle}) + "\n")
        answers.flush()


def main(make: Callable[[str], Doer] = Worker) -> None:
    # An engine's own output must not end up between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(make(sys.argv[1]), sys.stdin, answers)


if __name__ == "__main__":
    main()
