"""Steps of the study as processes, several side by side, each on processors of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter, sleep

_PAUSE = 0.2


@dataclass(frozen=True, slots=True)
class Job:
    """One step."""

    name: str
    """What to call it."""
    command: tuple[str, ...]
    """The process."""
    needs: tuple[str, ...] = ()
    """Jobs that must have succeeded before it begins."""


@dataclass(slots=True)
class _Running:
    job: Job
    slot: int
    process: subprocess.Popen[bytes]
    begun: float = field(default_factory=perf_counter)


def run(jobs: Sequence[Job], *, side_by_side: int, threads: int, seconds: float, logs: Path, tell: Callable[[str], None]) -> list[str]:
    """Run the jobs in order as far as what they need is done, so many side by side with so many threads each. After `seconds`, what still
    runs is ended and nothing else is begun. A job that fails ends only those that need it; returns the names of all that did not succeed.
    What each prints is in `logs`."""
    begin, waiting, running = perf_counter(), list(jobs), list[_Running]()
    done, failed = set[str](), list[str]()
    logs.mkdir(parents=True, exist_ok=True)
    while (waiting or running) and perf_counter() - begin < seconds:
        for each in [each for each in running if each.process.poll() is not None]:
            running.remove(each)
            good = each.process.returncode == 0
            (done.add if good else failed.append)(each.job.name)
            result = "done" if good else f"FAILED, see {_log(logs, each.job)}"
            tell(f"{perf_counter() - begin:6.0f} s  {each.job.name}: {result} after {perf_counter() - each.begun:.0f} s")
        for job in [job for job in waiting if set(job.needs) & set(failed)]:
            waiting.remove(job)
            failed.append(job.name)
        free = [slot for slot in range(side_by_side) if slot not in {each.slot for each in running}]
        for slot, job in zip(free, [job for job in waiting if done.issuperset(job.needs)], strict=False):
            waiting.remove(job)
            running.append(_Running(job, slot, _start(job, slot, threads, logs)))
        sleep(_PAUSE)
    for each in running:
        each.process.kill()
        each.process.wait()
    return [*failed, *(each.job.name for each in running), *(job.name for job in waiting)]


def _start(job: Job, slot: int, threads: int, logs: Path) -> subprocess.Popen[bytes]:
    count = str(threads)
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": count, "OMP_NUM_THREADS": count, "PYTHONUNBUFFERED": "1"}
    with _log(logs, job).open("ab") as log:
        return subprocess.Popen(job.command, env=environment, stdout=log, stderr=log, preexec_fn=partial(_pin, slot, threads))


def _pin(slot: int, threads: int) -> None:
    if sys.platform == "linux":
        allowed = sorted(os.sched_getaffinity(0))
        first = slot * threads % len(allowed)
        os.sched_setaffinity(0, allowed[first : first + threads])


def _log(logs: Path, job: Job) -> Path:
    return logs / f"{job.name.replace(' ', '-').replace(':', '').replace('/', '-')}.log"
