"""Compares replayed steps with built ones until replays of a model are trusted on this machine.

A checked step is computed twice from the same arrays of the cache: built in Python, and by its trace. Only the built step's tokens and
arrays are used, so a wrong trace changes no answer. The device compares the scores, and the host reads the result two steps later: nobody
waits for it. Steps only read the pools of pages, and leave new arrays in the cache, so neither computation sees the other's.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from pathlib import Path
from typing import cast

import mlx.core as mx

from ...kernels_metal.kept_trials import machine
from ...kernels_metal.kernel_trial import age
from ...util.cache_dir import cache_dir

STEPS = 64
"""Steps of a model that must be equal before one is replayed."""
TRACE_STEPS = 2
"""Steps of each trace that must be equal: the second is the first with other arrays than those at its creation."""
_ROUNDING, _TIE = 8, 2
"""Most that scores may differ, and most by which another token's score may be below the best, in units of rounding. Fused operations round
differently, so tokens that tie may change places."""
_UNITS = {mx.bfloat16: 2**-7, mx.float16: 2**-10, mx.float32: 2**-13}
"""Unit of rounding of a whole model by its dtype, relative to a row's largest score."""
_MOST_MODELS = 256

_log = logging.getLogger(__name__)
_faults: list[str] = []
"""Faults of any model of this process: all of them are built then."""


class ReplayCheck:
    """Permission to replay steps of one model. Results are kept in a file, by machine and versions."""

    def __init__(self, name: str = "this model", dtype: mx.Dtype = mx.bfloat16, file: Path | None = None, key: str = "") -> None:
        """`name` is for people, `dtype` that of activations. `file` keeps the result under `key`, which changes with the weights and
        versions; None keeps nothing."""
        self.name = name
        self._unit = _UNITS[dtype]
        self._file, self._key = file, key
        found = remembered(file).get(key)
        self._fault = found.get("fault") if found else None
        self._passed = STEPS if found and not self._fault else 0
        self._kept, self._age = found is not None, age()

    @property
    def allowed(self) -> bool:
        """False once a replayed step was wrong."""
        return not self._fault and not _faults

    def trusts(self, passed: int) -> bool:
        """Return True if steps may be replayed by a trace that was equal `passed` times."""
        if self._age != age():  # other kernels are used
            self._age, self._passed = age(), 0
        return self._passed >= STEPS and passed >= TRACE_STEPS

    def learn(self, result: mx.array) -> bool:
        """Learn from a result of `compare`. Return True if the scores were equal."""
        rows, gap, error = cast("list[float]", result.tolist())
        if gap > _TIE * self._unit:
            self.fail(f"another token, {gap:.2g} of the largest score below the right one")
        elif error > _ROUNDING * self._unit:
            self.fail(f"scores that differ by {error:.2g} of the largest")
        elif rows:  # built scores were numbers
            self._passed += 1
            if self._passed >= STEPS and not self._kept and not age():
                self._keep()
            return True
        return False

    def fail(self, reason: str) -> None:
        """Build all steps of this process from now on, and this model's in later ones."""
        if not self.allowed:
            return
        self._fault = reason
        _faults.append(reason)
        _log.warning("steps are built in Python, not replayed by MLX: a replayed step of %s gave %s", self.name, reason)
        self._keep()

    def _keep(self) -> None:
        self._kept = True
        if self._file is None:
            return
        known = remembered(self._file)
        known.pop(self._key, None)
        known[self._key] = {"name": self.name} | ({"fault": self._fault} if self._fault else {})
        content = {"machine": machine(), "models": dict(list(known.items())[-_MOST_MODELS:])}
        fresh = self._file.with_name(f"{self._file.name}.{os.getpid()}.{threading.get_ident()}")
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            fresh.write_text(json.dumps(content, indent=1), encoding="utf-8")
            fresh.replace(self._file)


def compare(built: mx.array, replayed: mx.array) -> mx.array:
    """Compare scores `[T, vocab]` on the device. Returns float32 `[3]`: the number of rows in which `built` has only numbers, and of these
    rows the largest distance of the replayed token's score to the best, and the largest difference, relative to the row's largest score."""
    right, other = built.astype(mx.float32), replayed.astype(mx.float32)
    judged = ~mx.isnan(right).any(-1)
    largest = mx.maximum(mx.where(mx.isfinite(right), mx.abs(right), 0).max(-1), 1e-30)
    error = mx.where(right == other, 0, mx.abs(right - other))
    error = mx.where(mx.isnan(error), mx.inf, error).max(-1)
    gap = right.max(-1) - mx.take_along_axis(right, mx.argmax(other, -1, keepdims=True), -1)[:, 0]
    found = [mx.where(judged, each / largest, 0).max() for each in (gap, error)]
    return mx.stack([judged.sum().astype(mx.float32), *found])


def remembered(file: Path | None) -> dict[str, dict[str, str]]:
    """Return what the file keeps of this machine and these versions by key: the model's name, and the fault if there was one."""
    if file is None:
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict) or content.get("machine") != machine() or not isinstance(content.get("models"), dict):
        return {}
    found = content["models"].items()
    return {key: value for key, value in found if isinstance(value, dict) and all(isinstance(each, str) for each in value.values())}


def replays_file() -> Path:
    """File of the results on this machine."""
    return cache_dir() / "replays.json"


def replay_lines(file: Path) -> list[str]:
    """Describe the kept results, for people."""
    found = list(remembered(file).values())
    right = sorted({each.get("name", "") for each in found if "fault" not in each})
    wrong = sorted({f"{each.get('name', '')} ({each['fault']})" for each in found if "fault" in each})
    lines = [f"steps replayed by MLX, equal to built ones in {STEPS} steps each: {', '.join(right)}"] if right else []
    if wrong:
        lines.append(f"steps built in Python, because MLX replayed them wrongly: {', '.join(wrong)}; without {file} they are checked again")
    return lines


def forget() -> None:
    """Forget the faults of this process."""
    _faults.clear()
