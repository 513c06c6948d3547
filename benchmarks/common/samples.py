"""Measurements, stored as CSV, and their medians and ratios."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import IO, get_type_hints

from ..engines import MODULES

MACHINE = "machine"
TOKENS_PER_S, SECONDS, BYTES = "tokens/s", "s", "bytes"


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement.

    `length` is the tokens of the prompt or in the cache, as the engine got them. `bytes` and `operations` are those of the prompt or of one
    decode step, 0 if unknown. `others` is the share of the processors that other processes used meanwhile. `idle_cpu_s` is the processor
    time that the worker used before the job.
    """

    model: str
    work: str
    engine: str
    round: int
    length: int
    streams: int
    steps: int
    value: float
    unit: str
    bytes: float = 0.0
    operations: float = 0.0
    others: float = 0.0
    idle_cpu_s: float = 0.0


class Writer:
    """Writes each sample at once, so an interrupted run keeps its samples."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._rows = csv.DictWriter(file, [field.name for field in fields(Sample)], lineterminator="\n")
        self._rows.writeheader()

    def add(self, sample: Sample) -> None:
        self._rows.writerow({key: f"{value:.6g}" if isinstance(value, float) else value for key, value in asdict(sample).items()})
        self._file.flush()


def read(path: Path) -> list[Sample]:
    """Read the samples of a file. Raises `ValueError` for a file that this program did not write."""
    types = get_type_hints(Sample)
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file)
        if rows.fieldnames != list(types):
            raise ValueError(f"{path}: the columns must be {', '.join(types)}")
        return [Sample(**{name: types[name](text) for name, text in row.items()}) for row in rows]


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, lowest and highest of several values."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        found = list(values)
        return cls(median(found), min(found), max(found))


class Results:
    """The samples of one model."""

    def __init__(self, model: str, samples: Iterable[Sample]) -> None:
        self.model = model
        self.samples = [sample for sample in samples if sample.model == model]

    @property
    def works(self) -> list[str]:
        return list(dict.fromkeys(sample.work for sample in self.samples if sample.engine != MACHINE))

    @property
    def engines(self) -> list[str]:
        """Engines in the order of the tables."""
        found = {sample.engine for sample in self.samples} - {MACHINE}
        return [name for name in MODULES if name in found] + sorted(found - set(MODULES))

    def of(self, work: str, engine: str) -> list[Sample]:
        return [sample for sample in self.samples if sample.work == work and sample.engine == engine]

    def shortened(self, work: str, engine: str) -> int | None:
        """Length of this engine's samples if another engine has longer ones."""
        longest = max((s.length for other in self.engines for s in self.of(work, other)), default=0)
        own = max((s.length for s in self.of(work, engine)), default=longest)
        return own if own < longest else None

    def spread(self, work: str, engine: str) -> Spread | None:
        found = self.of(work, engine)
        return Spread.of(sample.value for sample in found) if found else None

    def better(self, ours: tuple[str, str], theirs: tuple[str, str]) -> Spread | None:
        """Ratio of one (work, engine) to the other, over pairs of the same round. Above 1, `ours` is better: faster or smaller."""
        pairs = self._pairs(ours, theirs)
        if not pairs:
            return None
        return Spread.of(mine.value / other if mine.unit == TOKENS_PER_S else other / mine.value for mine, other in pairs)

    def part(self, one: tuple[str, str], of: tuple[str, str]) -> Spread | None:
        """One (work, engine) as a fraction of the other, over pairs of the same round."""
        pairs = self._pairs(one, of)
        return Spread.of(mine.value / other for mine, other in pairs) if pairs else None

    def _pairs(self, ones: tuple[str, str], others: tuple[str, str]) -> list[tuple[Sample, float]]:
        values = {sample.round: sample.value for sample in self.of(*others)}
        return [(sample, values[sample.round]) for sample in self.of(*ones) if sample.round in values]

    def share(self, work: str, engine: str) -> Spread | None:
        """Fraction of the machine's speed in the same round: bytes read for decoding, multiply-adds for prompts."""
        kind = "operations" if work.startswith("prefill") else "bytes"
        rates = {sample.round: sample.value for sample in self.of("multiply-add" if kind == "operations" else "read", MACHINE)}
        shares = []
        for sample in self.of(work, engine):
            cost = getattr(sample, kind)
            seconds = (sample.length if kind == "operations" else sample.streams) / sample.value
            if cost and sample.round in rates and sample.unit == TOKENS_PER_S:
                shares.append(cost / seconds / rates[sample.round])
        return Spread.of(shares) if shares else None
