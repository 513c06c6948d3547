"""One subject in a process of its own, as in `benchmarks.batch.worker`."""

from __future__ import annotations

from functools import partial

from .. import worker
from ..batch.client import Subject
from ..batch.worker import SubjectWorker
from ..batch.workloads import LLAMA_SERVER, OURS
from .workloads import ENGINE

JOBS = ("load", "answer", "step", "pairs", "leave", "connect", "short", "close")


def create(name: str) -> Subject:
    from .subjects import Engine, OtherLlamaServer, OtherMLXServer, OurServer

    kinds: dict[str, type[Subject]] = {ENGINE: Engine, OURS: OurServer, LLAMA_SERVER: OtherLlamaServer}
    return kinds.get(name, OtherMLXServer)()


if __name__ == "__main__":
    worker.main(partial(SubjectWorker, create=create, jobs=JOBS))
