"""Kernels that plain MLX can stand in for: each passes a trial on this machine before it is used, and is given up if a step fails because
of it. Attention has its own (`cache/attention/trial.py`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from ..cache.attention.select import SWITCH, has_gpu_kernels
from ..errors import UnsupportedShapeError, one_line

Kind = tuple[Any, ...]
"""What a variant of a kernel is compiled for."""


class Trial(Protocol):
    """What can be given up."""

    def give_up(self, error: BaseException, *, guilty: bool) -> bool:
        """Do without the kernels that are in use; with `guilty`, only without those that fail their trial now. Returns whether there are
        any."""
        ...

    def lost(self) -> list[str]:
        """For people: what is not used, and why."""
        ...

    @property
    def age(self) -> int:
        """Changes when kernels are given up, or others are used."""
        ...


TRIALS: list[Trial] = []
"""Every kernel that plain MLX can stand in for, except those of attention."""


class KernelTrial:
    """One kernel. Its kinds are tried when they are first asked for."""

    def __init__(self, what: str, run: Callable[..., str | None]) -> None:
        """`what` it computes, for messages. `run(*kind)` computes a small case both ways: it returns what is wrong, or None. RuntimeError
        and ValueError count as failures."""
        self.what = what
        self._age = 0
        self._run = run
        self._obstacles: dict[Kind, str | None] = {}
        TRIALS.append(self)

    @property
    def age(self) -> int:
        """See `Trial`."""
        return self._age

    def obstacle(self, *kind: Any) -> str | None:
        """Why the kernel is not used for this kind, in one line; None where it is."""
        if kind not in self._obstacles:
            self._obstacles[kind] = self._tried(kind)
        return self._obstacles[kind]

    def lines(self, kinds: Iterable[Kind]) -> list[str]:
        """For people: why plain MLX computes these kinds, if it does."""
        reasons = dict.fromkeys(self.obstacle(*kind) for kind in kinds)
        return [f"{self.what}: plain MLX instead: {reason}" for reason in reasons if reason]

    def lost(self) -> list[str]:
        """See `Trial`: of all kinds that were tried."""
        return self.lines(list(self._obstacles))

    def give_up(self, error: BaseException, *, guilty: bool) -> bool:
        """See `Trial`: by kinds that have passed their trial."""
        used = [kind for kind, obstacle in self._obstacles.items() if obstacle is None]
        used = [kind for kind in used if self._tried(kind)] if guilty else used
        self._obstacles.update((kind, f"a Metal kernel failed: {one_line(error)}") for kind in used)
        self._age += 1
        return bool(used)

    def forget(self) -> None:
        """Begin anew, as if nothing had been tried."""
        self._obstacles.clear()
        self._age += 1

    def _tried(self, kind: Kind) -> str | None:
        try:
            wrong = self._run(*kind)
        except UnsupportedShapeError as error:
            return one_line(error)
        except (RuntimeError, ValueError) as error:
            wrong = one_line(error)
        return f"a Metal kernel failed its trial: {wrong}" if wrong else None


def kernels_in_use() -> bool:
    """Whether MLX computes on a GPU that runs the kernels, and they are not switched off."""
    return has_gpu_kernels() and os.environ.get(SWITCH) != "0"


def give_up(error: BaseException, *, guilty: bool) -> bool:
    """A step has failed: do without all kernels of this module, or with `guilty` only without those that fail their trial now. Returns
    whether any was in use."""
    return sum([trial.give_up(error, guilty=guilty) for trial in TRIALS]) > 0


def age() -> int:
    """Changes when the kernels that are used do."""
    return sum([trial.age for trial in TRIALS])


def lost_lines() -> list[str]:
    """Which kernels are not used, and why."""
    return [line for trial in TRIALS for line in trial.lost()]
