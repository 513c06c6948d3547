"""A server or `AsyncLLM` in a separate process."""

from __future__ import annotations

from ..common import worker
from .client import Subject

JOBS = ("load", "answer", "beside", "decode", "write", "save", "restored", "close")


def create(name: str) -> Subject:
    """Create a subject, and import only its own modules."""
    if name.startswith("mlxinfer"):
        from .ours import Ours

        return Ours()
    from .servers import LlamaServer, MLXServer

    return LlamaServer() if name == "llama-server" else MLXServer()


if __name__ == "__main__":
    worker.main(create, JOBS)
