"""`AsyncLLM` of a model on several machines, for the server."""

from __future__ import annotations

from functools import partial

from typing_extensions import Self

from ..config import EngineArgs
from ..engine.async_llm import AsyncLLM
from ..engine.client.engine_thread import EngineThread, Progress
from ..engine.open_model import OpenModel
from .group import Group


class GroupThread(EngineThread):
    """Fails requests with the name of the lost machine, even if the ring noticed the loss first."""

    def __init__(self, group: Group, args: EngineArgs, progress: Progress | None) -> None:
        self._group = group
        super().__init__(partial(OpenModel.open, args, others=group), progress)

    def _fail_all(self, reason: str) -> None:
        super()._fail_all(self._group.reason_of(reason))


class GroupLLM(AsyncLLM):
    """An `AsyncLLM` whose other ranks are other processes.

    After the loss of a rank it answers no more requests and the process must end: waiting for another rank cannot be interrupted.
    """

    _group: Group

    @classmethod
    def joined(cls, group: Group, args: EngineArgs) -> Self:
        """Return an instance whose thread starts to load rank 0's part; `ready` also waits for the other ranks."""
        self = cls.__new__(cls)
        self._group = group
        self._start(args, None)
        return self

    def _start(self, args: EngineArgs, progress: Progress | None) -> None:
        self._thread = GroupThread(self._group, args, progress)
        self._group.on_loss(self._thread.give_up)

    @property
    def ended(self) -> bool:
        return bool(self._group.reason) or super().ended

    async def close(self) -> None:
        if not self._group.reason:
            await super().close()  # with the other ranks: a step may still be running
        self._group.close()
