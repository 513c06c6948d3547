"""Measures every way that has no result yet, as many as there is time for, so that a long study can be run in pieces."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from mlxinfer.errors import MLXInferError
from mlxinfer.evaluation.measure import Reading, compare

from .source import source
from .ways import Way, ways

Tell = Callable[[str], None]
POSITIONS = 4096


class Study:
    """Results by model and way, in a JSON file that is written after each."""

    def __init__(self, file: Path, room: Path, tell: Tell) -> None:
        """`room` keeps the sources, their samples and what they said."""
        self.file, self.room, self._tell = file, room, tell
        self.results = self._read()

    def _read(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.file.read_text(encoding="utf-8")) if self.file.exists() else []
        return found

    def run(self, models: dict[str, Path], chosen: tuple[str, ...], seconds: float) -> None:
        """Measure what is missing; nothing new is begun after `seconds`."""
        begin = perf_counter()
        self.room.mkdir(parents=True, exist_ok=True)
        for name, path in models.items():
            model = source(name, path, self.room)
            for way in ways():
                known = any((each["model"], each["way"]) == (name, way.key) for each in self.results)
                if known or (chosen and not way.key.startswith(chosen)):
                    continue
                if perf_counter() - begin > seconds:
                    return
                self._measure(name, model, way)

    def _measure(self, name: str, model: Path, way: Way) -> None:
        target = self.room / f"{name}.{os.getpid()}"
        shutil.rmtree(target, ignore_errors=True)
        begin = perf_counter()
        try:
            bpw = way.make(model, target)
        except (MLXInferError, RuntimeError, ValueError, TypeError) as error:
            self._tell(f"{name}, {way.key}: left out, {error}")
            return
        seconds = perf_counter() - begin
        found = compare(model, [target], Reading(positions=POSITIONS, cache=self.room / "teachers"))
        figures, scores = found.students[0], found.scores[0]
        assert scores.kl is not None
        means = [float(scores.kl[scores.window == window].mean()) for window in np.unique(scores.window)]
        result = {
            "model": name,
            "engine": way.engine,
            "way": way.key,
            "bpw": round(bpw or figures.bpw, 4),
            "kl_mean": figures.kl_mean,
            "kl_stderr": figures.kl_stderr,
            "kl_p99": figures.kl_p99,
            "top1": figures.top1,
            "top1_stderr": figures.top1_stderr,
            "ppl_ratio": figures.ppl_ratio,
            "positions": figures.positions,
            "seconds": round(seconds, 1),
            "kl_of_windows": [round(mean, 6) for mean in means],
        }
        self.results = [*self._read(), result]  # another run may have added some meanwhile
        self.file.write_text("[\n" + ",\n".join(json.dumps(each) for each in self.results) + "\n]\n", encoding="utf-8")
        kl = f"KL {figures.kl_mean:.4f} +- {figures.kl_stderr or 0.0:.4f}"
        self._tell(f"{name}, {way.key}: {result['bpw']:.2f} bpw, {kl}, {seconds:.0f} s")
        shutil.rmtree(target, ignore_errors=True)
