"""A server, or the engine without one, in a separate process."""

from __future__ import annotations

from ..batch.client import Subject
from ..batch.workloads import LLAMA_SERVER, OURS
from ..common import worker
from .workloads import ENGINE

JOBS = ("load", "answer", "step", "pairs", "connect", "short", "close")


def create(name: str) -> Subject:
    from .subjects import Engine, OtherLlamaServer, OtherMLXServer, OurServer

    kinds: dict[str, type[Subject]] = {ENGINE: Engine, OURS: OurServer, LLAMA_SERVER: OtherLlamaServer}
    return kinds.get(name, OtherMLXServer)()


if __name__ == "__main__":
    worker.main(create, JOBS)
