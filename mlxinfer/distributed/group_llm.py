"""A model on several machines as the server sees it: an `AsyncLLM`."""

from __future__ import annotations

from functools import partial

from typing_extensions import Self

from ..config import EngineArgs
from ..engine.async_llm import AsyncLLM
from ..engine.client.engine_thread import EngineThread, Progress
from ..engine.open_model import OpenModel
from .group import Group


class GroupThread(EngineThread):
    """Tells requests which machine was lost, also where the ring has noticed it first."""

    def __init__(self, group: Group, args: EngineArgs, progress: Progress | None) -> None:
        self._group = group
        super().__init__(partial(OpenModel.open, args, others=group), progress)

    def _fail_all(self, reason: str) -> None:
        super()._fail_all(self._group.reason_of(reason))


class GroupLLM(AsyncLLM):
    """An `AsyncLLM` whose other ranks are other processes. Once one of them is lost it answers nothing any more, and the process has to
    end: what waits for another rank cannot be interrupted."""

    _group: Group

    @classmethod
    def joined(cls, group: Group, args: EngineArgs) -> Self:
        """One whose thread begins to load rank 0's part; `ready` waits for the other ranks too."""
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
            await super().close()  # with the others: a step may still be under way
        self._group.close()
