"""What the teacher said, kept until each student has been compared with it: models are in memory one after another, never together."""

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
"""Codes of a row's least probability, and of a probability of 0."""


class Teacher:
    """Log-probabilities of every token at every position in 16 bits each, in memory or in a file that is read back in pieces.

    The codes of a row are evenly spaced between its largest and its smallest log-probability, a few ten-thousandths of a nat apart, and its
    probabilities are made to sum to 1 again when it is read. A KL divergence moves by some 1e-8 nats, which a model compared with itself
    shows. The likeliest token and the surprise at what follows are kept as they are.
    """

    def __init__(self, positions: int, vocab: int, folder: Path | None, about: dict[str, Any]) -> None:
        """`folder` None keeps it in memory. `about` says whose it is: `find` asks for the same."""
        self.vocab, self.folder, self._about = vocab, folder, {**about, "vocab": vocab, "positions": positions}
        self._codes: NDArray[np.uint16]
        shape = (positions, vocab)
        if folder is None:
            self._codes = np.zeros(shape, np.uint16)
        else:
            self._codes = np.memmap(_made(folder, positions * vocab * 2) / _ROWS, np.uint16, "w+", shape=shape)
        self._steps = np.zeros((positions, 1), np.float32)
        self.top = np.zeros(positions, np.int32)
        self.surprise = np.full(positions, np.nan)
        self.window = np.zeros(positions, np.int32)

    @property
    def scores(self) -> Scores:
        """How the teacher itself did."""
        return Scores(self.window, self.surprise)

    def write(self, first: int, number: int, logprobs: mx.array, surprise: NDArray[np.float64]) -> None:
        """Keep the float32 rows `[n, vocab]` of window `number`, whose first position is `first`, and what `surprise` [n] it was."""
        rows = slice(first, first + logprobs.shape[0])
        below = mx.max(logprobs, axis=-1, keepdims=True) - logprobs
        possible = mx.isfinite(below)
        steps = mx.maximum(mx.max(mx.where(possible, below, 0), axis=-1, keepdims=True), 1e-6) / _LAST
        codes = mx.where(possible, mx.round(below / steps), _NEVER).astype(mx.uint16)
        self._codes[rows], self._steps[rows] = np.array(codes), np.array(steps)
        self.top[rows] = np.array(mx.argmax(logprobs, axis=-1))
        self.surprise[rows], self.window[rows] = surprise, number

    def read(self, first: int, last: int) -> mx.array:
        """float32 log-probabilities `[n, vocab]` of these positions."""
        codes, steps = mx.array(np.asarray(self._codes[first:last])), mx.array(self._steps[first:last])
        rows = mx.where(codes == _NEVER, -mx.inf, -(codes.astype(mx.float32) * steps))
        return logprobs_of(rows)

    def finish(self) -> None:
        """All rows are written: what is in a folder can be found again from now on."""
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
        """What an earlier run kept there of the same model and text; None if it is another's, or there is nothing whole."""
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
        """The range of positions in pieces of `most`."""
        return ((start, min(start + most, last)) for start in range(first, last, most))


def _made(folder: Path, nbytes: int) -> Path:
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
