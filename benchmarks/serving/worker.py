"""One subject in a process of its own, as in `benchmarks.batch.worker`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import worker
from ..batch.subject import Subject
from ..batch.works import LLAMA_SERVER, OURS
from .works import ENGINE

JOBS = ("load", "answer", "step", "connect", "short", "close")


class ServingWorker:
    def __init__(self, name: str) -> None:
        self._name = name
        self._subject: Subject | None = None

    def do(self, job: Mapping[str, Any]) -> dict[str, Any]:
        options = dict(job)
        kind = options.pop("do")
        if kind not in JOBS:
            raise ValueError(f"no such job: {kind}")
        self._subject = self._subject or create(self._name)
        answer: dict[str, Any] = getattr(self._subject, kind)(**options)
        return answer

    def cpu_seconds(self) -> float:
        return self._subject.cpu_seconds() if self._subject else 0.0


def create(name: str) -> Subject:
    from .subjects import Engine, OtherLlamaServer, OtherMLXServer, OurServer

    kinds: dict[str, type[Subject]] = {ENGINE: Engine, OURS: OurServer, LLAMA_SERVER: OtherLlamaServer}
    return kinds.get(name, OtherMLXServer)()


if __name__ == "__main__":
    worker.main(ServingWorker)
