"""Gradients of the predictions with respect to the last states, and the cost of rounding the head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import mlx.core as mx
import numpy as np

from ...loading.checkpoint import Checkpoint
from ...models import architecture
from ...models.decoder import OutputLayer
from ...nn.weights import Format, numbers
from ..calibrate.blockwise import load_part
from ..encode.affine import fit
from ..encode.gptq import Factor, decode, encode_with_feedback, factorize, matmul, to_numpy
from ..write.reader import blocks

_ROWS = 512
"""States multiplied with the head at once."""
_JUDGED = 256
"""States for which the cost of rounding the head is measured."""


class FinalStates:
    """The states after the last block, and the head. One block of the head's rows is in memory at a time."""

    def __init__(self, checkpoint: Checkpoint, states: Sequence[mx.array]) -> None:
        """Load the head; `states` are `[tokens, hidden]` per batch."""
        plan = architecture(checkpoint.config)
        part, weights = load_part(checkpoint, plan.sizes.layers + 1)
        assert isinstance(part, OutputLayer)
        self._norm = part.norm
        self._norm.in_plain_operations()
        self.tied = part.head is None
        """True if the embedding is also the head."""
        self.name = weights.stored_name(plan.embedding if self.tied else "lm_head.weight")
        """Name of the head's tensor."""
        self._checkpoint, self._request = checkpoint, weights.index.requests[self.name]
        self._scale, self._cap = plan.logit_scale, plan.logit_cap
        self._states = list(states)
        self._rows = np.concatenate([to_numpy(self._norm(state)) for state in states])
        self._totals = np.zeros(0)

    def gradients(self) -> list[mx.array]:
        """Return gradients of the log-probability of a token, drawn from the model, with respect to each state, per batch."""
        chosen = self._draw()
        total = np.zeros_like(self._rows)
        for first, block in self._blocks():
            for rows in self._pieces():
                logits, slopes = self._logits(self._rows[rows], block)
                error = -np.exp(logits - self._totals[rows, None])
                here = chosen[rows] - first
                inside = np.flatnonzero((here >= 0) & (here < len(block)))
                error[inside, here[inside]] += 1
                total[rows] += matmul(error * slopes, block)
        found, at = [], 0
        for state in self._states:
            gradient = mx.array(total[at : at + state.shape[0]]).astype(state.dtype)
            found.append(mx.vjp(self._norm, [state], [gradient])[1][0])
            mx.eval(found[-1])
            at += state.shape[0]
        return found

    @property
    def importance(self) -> mx.array:
        """Mean square of each input of the head, float32 `[hidden]`."""
        return mx.array(np.square(self._rows).mean(0))

    def factor(self) -> Factor:
        """Return a factor for error feedback in the head, from the states that `costs` does not judge by."""
        others = np.delete(self._rows, np.s_[:: self._step()], axis=0)
        others = others if len(others) else self._rows
        return factorize(others.T @ others / len(others), self.name)

    def costs(self, forms: Sequence[Format], dtype: mx.Dtype, factor: Factor | None = None) -> list[float]:
        """Return the mean KL divergence in nats from rounding the head to each format, by the weighted fit or with `factor` by error
        feedback.

        Call `gradients` first.
        """
        rows, before, importance = self._rows[:: self._step()], self._totals[:: self._step(), None], self.importance
        shifts, totals = np.zeros((len(forms), len(rows))), [_Total(len(rows)) for _ in forms]
        for _, block in self._blocks():
            logits, _ = self._logits(rows, block)
            shares = np.exp(logits - before)
            for number, form in enumerate(forms):
                after, _ = self._logits(rows, rounded(mx.array(block).astype(dtype), form, importance, factor))
                shifts[number] += (shares * (logits - after)).sum(-1)
                totals[number].add(after)
        return [float((shift + total.value() - before[:, 0]).mean()) for shift, total in zip(shifts, totals, strict=True)]

    def _step(self) -> int:
        return max(len(self._rows) // _JUDGED, 2)  # leaves states for `factor`

    def _draw(self) -> np.ndarray:
        """Draw a token for each state from its probabilities, and store the log of the sum of exponentials."""
        rng = np.random.default_rng(0)
        total, best, chosen = _Total(len(self._rows)), np.full(len(self._rows), -np.inf), np.zeros(len(self._rows), np.int64)
        for first, block in self._blocks():
            parts = []
            for rows in self._pieces():
                logits, _ = self._logits(self._rows[rows], block)
                parts.append(logits.max(-1) + np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)))
                noise = np.maximum(rng.standard_exponential(logits.shape, np.float32), np.finfo(np.float32).tiny)
                logits = logits - np.log(noise)
                place = logits.argmax(-1)
                value = np.take_along_axis(logits, place[:, None], -1)[:, 0]
                better = value > best[rows]
                best[rows], chosen[rows] = np.where(better, value, best[rows]), np.where(better, first + place, chosen[rows])
            total.add(np.concatenate(parts)[:, None])
        self._totals = total.value()
        return chosen

    def _blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the head's rows in blocks, each with the number of its first row."""
        first = 0
        for block in blocks(self._checkpoint, self._request):
            plain = to_numpy(numbers(block))
            yield first, plain
            first += len(plain)

    def _pieces(self) -> Iterator[slice]:
        return (slice(first, first + _ROWS) for first in range(0, len(self._rows), _ROWS))

    def _logits(self, rows: np.ndarray, block: np.ndarray) -> tuple[np.ndarray, np.ndarray | float]:
        """Return logits and their derivative by the product."""
        found = matmul(rows, block.T) * self._scale
        if self._cap is None:
            return found, self._scale
        turned = np.tanh(found / self._cap)
        return turned * self._cap, (1 - np.square(turned)) * self._scale


def rounded(plain: mx.array, form: Format, importance: mx.array, factor: Factor | None) -> np.ndarray:
    """Return rows, float32 `[rows, in]`, as rounded by the weighted fit, or with `factor` by error feedback."""
    if factor is None:
        return to_numpy(fit(plain, form, importance).dequantize(mx.float32))
    return decode(encode_with_feedback(plain, form, factor), form.group_size)


class _Total:
    """Logarithm of sums of exponentials over numbers that arrive in pieces."""

    def __init__(self, rows: int) -> None:
        self._high, self._sum = np.full(rows, -np.inf), np.zeros(rows)

    def add(self, logits: np.ndarray) -> None:
        high = np.maximum(self._high, logits.max(-1))
        self._sum = self._sum * np.exp(self._high - high) + np.exp(logits - high[:, None]).sum(-1)
        self._high = high

    def value(self) -> np.ndarray:
        found: np.ndarray = self._high + np.log(self._sum)
        return found
