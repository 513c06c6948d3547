"""An engine or a server in a separate process. It reads jobs from standard input, a JSON object per line, and answers each with one.

    {"do": "load", "model": ..., "threads": 2, "context": 4096, "prompt": "..."}    -> {"text": ...}
    {"do": "prefill", "tokens": 512}                                                -> {"seconds": ...}
    {"do": "decode", "depth": 0, "streams": 1, "steps": 64}                         -> {"seconds": ...}
    {"do": "about"}, {"do": "cost", ...}, {"do": "memory"}, {"do": "machine", "bytes": ...}

A failure is answered as {"error": ...}. Every answer has the processor time of the job (`cpu_s`; of the first job, since the process
started), and the processor time between the previous answer and this job (`idle_cpu_s`). The latter shows a worker that computes while
another worker is measured.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Collection, Mapping
from time import process_time
from typing import IO, Any

from ..engines import create
from ..engines.base import JOBS


class Worker:
    """Does jobs: methods of one object, which return the answers. The first job creates the object, so its start can be timed from
    outside."""

    def __init__(self, create: Callable[[], Any], jobs: Collection[str]) -> None:
        self._create, self._jobs = create, jobs
        self._object: Any = None

    def do(self, job: Mapping[str, Any]) -> dict[str, Any]:
        options = dict(job)
        kind = options.pop("do", None)
        if kind not in self._jobs:
            raise ValueError(f"no such job: {job!r}")
        self._object = self._object or self._create()
        answer: dict[str, Any] = getattr(self._object, kind)(**options)
        return answer

    def cpu_seconds(self) -> float:
        """Processor time until now, including that of a server."""
        used: float = self._object.cpu_seconds() if hasattr(self._object, "cpu_seconds") else process_time()
        return used


def serve(worker: Worker, jobs: IO[str], answers: IO[str]) -> None:
    """Answer jobs until the input ends."""
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


def main(create: Callable[[str], Any] = create, jobs: Collection[str] = JOBS) -> None:
    # The output of an engine must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(Worker(lambda: create(sys.argv[1]), jobs), sys.stdin, answers)


if __name__ == "__main__":
    main()
