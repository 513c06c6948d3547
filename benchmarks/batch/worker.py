"""One subject in a process of its own: the protocol of `benchmarks.worker`, with the subject's methods as jobs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from .. import worker
from .client import Subject

JOBS = ("load", "answer", "beside", "decode", "write", "keep", "kept", "close")


class SubjectWorker:
    def __init__(self, name: str, create: Callable[[str], Subject], jobs: Collection[str]) -> None:
        """The first job creates the subject, so that its start can be timed from outside."""
        self._create = partial(create, name)
        self._jobs = jobs
        self._subject: Subject | None = None

    def do(self, job: Mapping[str, Any]) -> dict[str, Any]:
        options = dict(job)
        kind = options.pop("do")
        if kind not in self._jobs:
            raise ValueError(f"no such job: {kind}")
        self._subject = self._subject or self._create()
        answer: dict[str, Any] = getattr(self._subject, kind)(**options)
        return answer

    def cpu_seconds(self) -> float:
        return self._subject.cpu_seconds() if self._subject else 0.0


def create(name: str) -> Subject:
    """Imports only what this subject needs."""
    if name.startswith("mlxinfer"):
        from .ours import Ours

        return Ours()
    from .servers import LlamaServer, MLXServer

    return LlamaServer() if name == "llama-server" else MLXServer()


if __name__ == "__main__":
    worker.main(partial(SubjectWorker, create=create, jobs=JOBS))
