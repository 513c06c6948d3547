"""Log-probabilities of the teacher, kept for the comparison with each student: one model is in memory at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..errors import EvaluationError
from .figures import Scores
from .probabilities import logprobs_of

_ABOUT, _ROWS, _SCORES = "teacher.json", "logprobs.u16", "scores.npz"


_SLACK = 64 << 20
"""Bytes to leave free on a disk."""
_LAST, _NEVER = 65_534, 65_535
"""Codes of a row's smallest probability, and of a probability of 0."""


class Teacher:
    """Log-probabilities of every token at every position, 16 bits each, in memory or in a file that is read in pieces.

    The codes of a row are evenly spaced between its largest and smallest log-probability, a few ten-thousandths of a nat apart. A row's
    probabilities are normalised again when it is read. A KL divergence moves by about 1e-8 nats, which a model compared with itself shows.
    The most likely token and the surprise at the next token are exact.
    """

    def __init__(self, positions: int, vocab: int, folder: Path | None, about: dict[str, Any]) -> None:
        """Create a record; `folder` None keeps it in memory. `about` identifies model and text for `find`."""
        self.vocab, self.folder, self._about = vocab, folder, {**about, "vocab": vocab, "positions": positions}
        self._codes: NDArray[np.uint16]
        shape = (positions, vocab)
        if folder is None:
            self._codes = np.zeros(shape, np.uint16)
        else:
            self._codes = np.memmap(_make_folder(folder, positions * vocab * 2) / _ROWS, np.uint16, "w+", shape=shape)
        self._steps = np.zeros((positions, 1), np.float32)
        self.top = np.zeros(positions, np.int32)
        self.surprise = np.full(positions, np.nan)
        self.window = np.zeros(positions, np.int32)

    @property
    def scores(self) -> Scores:
        """Scores of the teacher itself."""
        return Scores(self.window, self.surprise)

    def write(self, first: int, number: int, logprobs: mx.array, surprise: NDArray[np.float64]) -> None:
        """Store the float32 rows `[n, vocab]` of window `number` from position `first` on, and their `surprise` [n]."""
        rows = slice(first, first + logprobs.shape[0])
        below = mx.max(logprobs, axis=-1, keepdims=True) - logprobs
        possible = mx.isfinite(below)
        steps = mx.maximum(mx.max(mx.where(possible, below, 0), axis=-1, keepdims=True), 1e-6) / _LAST
        codes = mx.where(possible, mx.round(below / steps), _NEVER).astype(mx.uint16)
        self._codes[rows], self._steps[rows] = np.array(codes), np.array(steps)
        self.top[rows] = np.array(mx.argmax(logprobs, axis=-1))
        self.surprise[rows], self.window[rows] = surprise, number

    def read(self, first: int, last: int) -> mx.array:
        """Return float32 log-probabilities `[n, vocab]` of these positions."""
        codes, steps = mx.array(np.asarray(self._codes[first:last])), mx.array(self._steps[first:last])
        rows = mx.where(codes == _NEVER, -mx.inf, -(codes.astype(mx.float32) * steps))
        return logprobs_of(rows)

    def finish(self) -> None:
        """Complete the record after the last row, so that `find` finds it in its folder."""
        if self.folder is None:
            return
        try:
            self._codes.flush()  # type: ignore[attr-defined]
            np.savez(self.folder / _SCORES, top=self.top, steps=self._steps, surprise=self.surprise, window=self.window)
            (self.folder / _ABOUT).write_text(json.dumps(self._about), encoding="utf-8")
        except OSError as error:
            raise _cannot_write(self.folder, error) from None

    @classmethod
    def find(cls, folder: Path, about: dict[str, Any]) -> Teacher | None:
        """Return the record of the same model and text that an earlier run left in `folder`; None without a complete one."""
        try:
            known = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
            if not isinstance(known, dict) or not about.items() <= known.items():
                return None
            found = cls.__new__(cls)
            found.vocab, found.folder, found._about = known["vocab"], folder, known
            found._codes = np.memmap(folder / _ROWS, np.uint16, "r", shape=(known["positions"], known["vocab"]))
            with np.load(folder / _SCORES) as kept:
                found.top, found._steps = kept["top"], kept["steps"]
                found.surprise, found.window = kept["surprise"], kept["window"]
        except (OSError, ValueError, KeyError):
            return None
        return found

    def pieces(self, first: int, last: int, most: int = 64) -> Iterator[tuple[int, int]]:
        """Yield the range of positions in pieces of `most`."""
        return ((start, min(start + most, last)) for start in range(first, last, most))


def _make_folder(folder: Path, nbytes: int) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _ABOUT).unlink(missing_ok=True)  # not whole until it is finished
        system = os.statvfs(folder)
    except OSError as error:
        raise _cannot_write(folder, error) from None
    free = system.f_bavail * system.f_frsize
    if free < nbytes + _SLACK:
        raise EvaluationError(
            f"the teacher's probabilities take {nbytes / 1e9:.2f} GB in {folder}, where {free / 1e9:.2f} GB are free: "
            "name a folder with more room with --cache, or compare fewer --positions"
        )
    return folder


def _cannot_write(folder: Path | None, error: OSError) -> EvaluationError:
    return EvaluationError(f"cannot write {folder}: {error.strerror or error}")
