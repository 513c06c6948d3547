"""Trials of kernels that plain MLX can replace: each passes one on this machine before its first use, and is disabled once a step fails
because of it. Passed trials are kept on disk; failed ones are repeated in the next process, since their cause may be gone."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import field, replace
from functools import cache
from threading import Lock, Timer
from time import monotonic
from typing import Any

import mlx.core as mx

from ..errors import UnsupportedShapeError, one_line
from ..util import mac
from ..util.dataclass import dataclass
from ..util.device import is_gpu
from . import executors, kept_trials
from .source import readable

SWITCH = "MLXINFER_METAL_KERNELS"
Kind = tuple[Any, ...]
"""Arguments for which a variant of a kernel is compiled."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Speed of a variant compared with MLX's products."""

    times_mlx: float
    """Speed as a multiple of MLX's."""
    stalled: bool = False
    """True if it became much slower during the measurement."""
    seconds: float = 0.0
    """Mean time of one product; 0 if only the ratio is known."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a trial of one kind."""

    obstacle: str | None = None
    """Reason in one line why the kernel is not used; None if it is."""
    quiet: bool = False
    """True if the obstacle is not a loss: MLX is faster, or a kernel does not exist."""
    speeds: Mapping[int, Speed] = field(default_factory=dict)
    """Of a kernel whose speed is measured: the variants that are used, by rows."""
    power: str = ""
    """Power of the machine while it measured, if that was less than usual, such as "battery"."""


Speeds = Mapping[int, Speed]
"""Of all variants of a kernel for a kind, by rows."""
MARGIN = 1.03
"""Least factor between two speeds that are different: a smaller one is noise, and changes no choice."""


def faster_variants(kind: Kind, speeds: Speeds, used: Collection[int], *, least: float = 1.0) -> Verdict:
    """Use the variants whose speed is more than `least` times MLX's, by a margin: variants that an earlier measurement favoured, `used`,
    stay in use until they are slower by the same margin."""
    fast = {
        rows: speed
        for rows, speed in speeds.items()
        if not speed.stalled and speed.times_mlx >= (least / MARGIN if rows in used else least * MARGIN)
    }
    if fast or not speeds:
        return Verdict(speeds=fast)
    if any(speed.stalled for speed in speeds.values()):
        return Verdict("the kernel became slower while it ran")
    best = max(speed.times_mlx for speed in speeds.values())
    return Verdict(f"the kernel has only {best:.3g}x its speed", quiet=True)


def unless_slower(kind: Kind, speeds: Speeds, used: Collection[int]) -> Verdict:
    """Use a kernel unless MLX's operations are faster by the margin: it also saves the host launches, which is not measured."""
    return faster_variants(kind, speeds, used, least=MARGIN**-2)


@dataclass(frozen=True, slots=True)
class _Kept:
    """Result of a passed trial."""

    speeds: Speeds
    used: frozenset[int]
    """The variants that were chosen."""
    power: str
    """As in `Verdict`."""


class KernelTrial:
    """Verdicts on one kernel, by kind. A kind is tried when it is first requested."""

    def __init__(
        self,
        name: str,
        check: Callable[..., str | None],
        *,
        speeds: Callable[..., Speeds] | None = None,
        choose: Callable[[Kind, Speeds, Collection[int]], Verdict] = faster_variants,
        describe: Callable[[Kind, Verdict], str] = lambda _, verdict: f": {choice_line(verdict)}",
        failure: str = "a Metal kernel failed its trial",
        listed: bool = True,
    ) -> None:
        """`check(*kind)` computes a small case both ways and returns the fault, or None; RuntimeError and ValueError are faults too.
        `speeds(*kind)` measures the variants of a kernel that passed, and `choose` decides by them; without `speeds` it is used.
        `describe` continues a line that starts with `name`. Unless `listed`, the functions of this module leave this kernel out."""
        self.name = name
        self.age = 0  # changes with verdicts on which results of callers depend
        self.lock = Lock()
        self.verdicts: dict[Kind, Verdict] = {}
        self._check, self._describe, self._failure = check, describe, failure
        self._speeds, self._choose = speeds, choose
        if listed:
            TRIALS.append(self)

    def obstacle(self, *kind: Any) -> str | None:
        """Return the reason in one line why the kernel is not used for this kind; None if it is."""
        return (self.verdicts.get(kind) or self._tried(kind)).obstacle

    def _tried(self, kind: Kind) -> Verdict:
        with self.lock:
            if kind not in self.verdicts:
                self.verdicts[kind] = self._verdict(kind)
            return self.verdicts[kind]

    def try_now(self, *kind: Any, again: bool = False, speeds: Callable[..., Speeds] | None = None) -> Verdict:
        """Return the verdict on a kind, of which callers may have assumed that the kernel is not used. With `again`, a known verdict is
        replaced; `speeds` is used instead of the trial's own."""
        with self.lock:
            if again or kind not in self.verdicts:
                self.verdicts[kind] = self._verdict(kind, again=again, measure=speeds)
                self.age += 1
            return self.verdicts[kind]

    def _verdict(self, kind: Kind, *, again: bool = False, measure: Callable[..., Speeds] | None = None) -> Verdict:
        kept = self._kept(kind)
        if kept is not None and not again and not kept_trials.repeated() and not (kept.power and not _power_now().limited):
            return replace(self._choose(kind, kept.speeds, kept.used), power=kept.power)
        with _NOTICE.trial():
            speeds = self.problem(kind) or self._measured(kind, measure)
        if isinstance(speeds, Verdict):
            kept_trials.drop(self.name, self._check, [kind])
            return speeds
        verdict = self._choose(kind, speeds, kept.used if kept else ())
        power = mac.power() if speeds else mac.Power()
        found = _Kept(speeds, frozenset(verdict.speeds), str(power) if power.limited else "")
        kept_trials.keep(self.name, self._check, kind, _entry(found))
        return replace(verdict, power=found.power)

    def _measured(self, kind: Kind, measure: Callable[..., Speeds] | None) -> Speeds | Verdict:
        """Return the speeds, none if they do not matter; the obstacle if the device fails. Only a GPU's speeds matter to a trial of its
        own."""
        measure = measure or (self._speeds if executors.measurable() else None)
        try:
            return measure(*kind) if measure else {}
        except RuntimeError as error:
            return Verdict(f"its speed could not be measured: {fault_line(error)}")

    def _kept(self, kind: Kind) -> _Kept | None:
        """Return the result of a kind that passed its trial in an earlier process; None if none is known."""
        entry = kept_trials.kept(self.name, self._check, kind)
        if entry is None:
            return None
        try:
            speeds = {int(rows): Speed(float(times), bool(stalled)) for rows, (times, stalled, _) in entry["speeds"].items()}
            used = frozenset(int(rows) for rows, (_, _, chosen) in entry["speeds"].items() if chosen)
            return _Kept(speeds, used, str(entry.get("power", "")))
        except (AttributeError, KeyError, TypeError, ValueError):
            return None

    def problem(self, kind: Kind) -> Verdict | None:
        """Run the check now. Return None if the kernel passes."""
        try:
            fault = self._check(*kind)
        except UnsupportedShapeError as error:
            return Verdict(one_line(error))
        except (RuntimeError, ValueError) as error:
            fault = fault_line(error)
            if len(_ERRORS) < _MOST_ERRORS:
                _ERRORS.append((f"{self.name} {kind}", readable(str(error))[:_ERROR_CHARACTERS]))
        return Verdict(f"{self._failure}: {fault}") if fault else None

    def disable(self, error: BaseException, *, guilty: bool, kinds: Iterable[Kind] | None = None) -> bool:
        """Disable the kernel for `kinds`, by default all in use; with `guilty`, only for those that fail their trial now. Return True if
        there are any."""
        with self.lock:
            used = [kind for kind, verdict in self.verdicts.items() if verdict.obstacle is None] if kinds is None else list(kinds)
            used = [kind for kind in used if self.problem(kind)] if guilty else used
            self.verdicts.update((kind, Verdict(f"a Metal kernel failed: {fault_line(error)}")) for kind in used)
            self.age += 1
            kept_trials.drop(self.name, self._check, used)
        return bool(used)

    def forget(self) -> None:
        """Remove all verdicts."""
        self.verdicts.clear()
        self.age += 1

    def lines(self, kinds: Iterable[Kind]) -> list[str]:
        """Describe these kinds for people, if their kernel is lost. Runs their trials."""
        tried = [kind for kind in kinds if self.obstacle(*kind)]
        return self._described(kind for kind in tried if not self.verdicts[kind].quiet)

    def lost(self) -> list[str]:
        """Describe all kinds whose kernel is lost, for people."""
        return self._described([kind for kind, verdict in list(self.verdicts.items()) if verdict.obstacle and not verdict.quiet])

    def described(self) -> list[str]:
        """Describe all kinds that were tried, for people."""
        return self._described(list(self.verdicts))

    def _described(self, kinds: Iterable[Kind]) -> list[str]:
        return sorted({self.name + self._describe(kind, self.verdicts[kind]) + _measured_on(self.verdicts[kind]) for kind in kinds})


class _Notice:
    """Tells a user once per process that trials take long, which Metal's compiler makes them do when they are the first of a machine."""

    def __init__(self) -> None:
        self.tell: Callable[[], None] | None = None
        self._told, self._spent = False, 0.0

    @contextlib.contextmanager
    def trial(self) -> Iterator[None]:
        """Count the time of the block."""
        if self.tell is None or self._told:
            yield
            return
        begun, timer = monotonic(), Timer(max(_SLOW_SECONDS - self._spent, 0.0), self._due)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            self._spent += monotonic() - begun

    def _due(self) -> None:
        if self.tell is not None and not self._told:
            self._told = True
            self.tell()


_SLOW_SECONDS = 1.0
_NOTICE = _Notice()


@contextlib.contextmanager
def slow_trials_told(tell: Callable[[], None]) -> Iterator[None]:
    """Within the context, call `tell` from another thread when trials have taken a second in all; once per process."""
    _NOTICE.tell = tell
    try:
        yield
    finally:
        _NOTICE.tell = None


def choice_line(verdict: Verdict) -> str:
    """Describe the choice between a kernel and plain MLX, and the speed of a kernel without variants."""
    if verdict.obstacle:
        return f"plain MLX instead: {verdict.obstacle}"
    return "this project's kernel" + "".join(f", {speed.times_mlx:.3g}x plain MLX" for speed in list(verdict.speeds.values())[:1])


def _measured_on(verdict: Verdict) -> str:
    return f" (measured on {verdict.power})" if verdict.power else ""


def _entry(kept: _Kept) -> dict[str, Any]:
    speeds = {str(rows): [round(speed.times_mlx, 3), speed.stalled, rows in kept.used] for rows, speed in kept.speeds.items()}
    return {"speeds": speeds} | ({"power": kept.power} if kept.power else {})


@cache
def _power_now() -> mac.Power:
    """Return the power of this machine at the first question."""
    return mac.power()


_ERRORS: list[tuple[str, str]] = []
_MOST_ERRORS, _ERROR_CHARACTERS = 32, 1 << 16


def failed_trials() -> list[tuple[str, str]]:
    """Return (kernel and kind, whole error) of each trial that raised in this process, such as a compiler's messages."""
    return list(_ERRORS)


def fault_line(error: BaseException) -> str:
    """Return an error in one line. Of a compiler's messages, the first error: warnings may come before."""
    first = next((line for line in str(error).splitlines() if _COMPILE_ERROR.search(line)), None)
    return one_line(error if first is None else readable(first))


_COMPILE_ERROR = re.compile(r"(^|[:\s])(fatal )?error: ")

TRIALS: list[KernelTrial] = []
"""All kernels except attention, which is disabled and reported by layer."""


def difference(got: mx.array, expected: mx.array, most: float, mean: float = math.inf) -> str | None:
    """Describe errors relative to the largest expected number, unless their maximum is below `most` and their mean below `mean`.

    Wrong code returns numbers unrelated to the right ones, so bounds can be loose: rounding to bfloat16 costs 0.004 at most.
    """
    wanted = expected.astype(mx.float32)
    errors = mx.abs(got.astype(mx.float32) - wanted) / mx.abs(wanted).max()
    largest, average = float(errors.max().item()), float(errors.mean().item())  # type: ignore[arg-type]
    return None if largest < most and average < mean else f"differ from plain MLX by {largest:.2g} of the largest"


def has_gpu_kernels() -> bool:
    """True if MLX computes on a GPU that runs the kernels, switched off or not."""
    return is_gpu() and executors.available()


def kernels_in_use() -> bool:
    """True if MLX computes on a GPU that runs the kernels, and `MLXINFER_METAL_KERNELS` does not switch them off."""
    return has_gpu_kernels() and os.environ.get(SWITCH) != "0"


def disable(error: BaseException, *, guilty: bool) -> bool:
    """Disable all kernels in use after a step failed; with `guilty`, only those that fail their trial now. Return True if there are any."""
    return sum([trial.disable(error, guilty=guilty) for trial in TRIALS]) > 0


def age() -> int:
    """Return a number that changes with the kernels in use."""
    return sum([trial.age for trial in TRIALS])


def described_lines() -> list[str]:
    """Describe all kinds of all kernels that were tried, for people."""
    return [line for trial in TRIALS for line in trial.described()]


def lost_lines() -> list[str]:
    """Describe the kernels that are lost, for people."""
    return [line for trial in TRIALS for line in trial.lost()]
