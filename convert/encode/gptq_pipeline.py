"""Encodes a model by GPTQ while it reads texts: each block as soon as all texts have passed it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from ...loading.checkpoint import Checkpoint
from ...loading.weights import Progress
from ...models.blockwise import BATCH, batches
from ...nn.weights import Format, Quantized
from ..calibrate.blockwise import InputRecorder, read_through
from ..calibrate.importance import Moments
from ..encode.gptq import add_gram, matmul, to_numpy
from ..plan.quantization_plan import is_planned
from ..plan.weight_map import ConversionPlan, OutputTensor
from ..write.journal import Journal, JournalBookmarks, Values
from ..write.reader import blocks
from .affine import Parts, fit_parts, pack_codes
from .gptq import Factor, decode, encode_with_feedback, factorize
from .quantizer import Quantizer

_ASIDE = 16
"""One text in `_ASIDE` is kept for validation."""
_HELD_OUT = 512
"""Validation inputs that are stored."""
_LEAST_SEEN = 4
"""Tokens per column that an expert must have seen. With fewer, H would fit these tokens instead of what inputs have in common."""


def encode_all(
    checkpoint: Checkpoint,
    forward: Checkpoint,
    planned: ConversionPlan,
    texts: Sequence[Sequence[int]],
    journal: Journal,
    progress: Progress | None = None,
    *,
    batch: int = BATCH,
) -> Encodings:
    """Encode all matrices with an affine target by error feedback while the model reads these texts.

    `forward` is the same checkpoint opened for computing; `checkpoint` is read as it will be written. A matrix keeps the weighted fit if
    that loses less on validation texts, and an expert if it saw few tokens. An interrupted run resumes at its block. Raises
    `ConversionError` for NaN inputs, `MLXInferError` for a checkpoint that cannot be loaded, OSError.
    """
    done = journal.done("gptq")
    kept = {_unit(output) for output in planned.outputs if journal.done(_unit(output)) or journal.done(f"tensor {output.name}")}
    if done is None or not kept.issuperset(done["units"]):
        journal.forget("gptq")
        aside = max(len(texts) // _ASIDE, 1) if len(texts) > 1 else 0
        encoder = _Encoder(checkpoint, planned, journal, sum(map(len, texts)))
        bookmarks = JournalBookmarks(journal, "gptq states")
        read_through(forward, batches(texts, held_out=aside, size=batch), encoder, progress, bookmarks)
        journal.record("gptq", {"units": [_unit(output) for output in planned.outputs if journal.done(_unit(output))]})
        bookmarks.forget()
    return Encodings(journal, planned)


class Encodings:
    """Encoded tensors, stored in files until they are written."""

    def __init__(self, journal: Journal, planned: ConversionPlan) -> None:
        self._journal = journal
        values = [journal.done(_unit(output)) for output in planned.outputs]
        self.notes = _notes([each for each in values if each is not None])
        """Messages for the user."""

    def pieces(self, output: OutputTensor) -> tuple[list[list[mx.array]], dict[str, Any]] | None:
        """Return the arrays of one tensor in pieces, each in the order of `OutputTensor.parts`, and its relative errors.

        None if it was not encoded.
        """
        found = self._journal.load(_unit(output))
        if found is None:
            return None
        arrays, values = found
        pieces = [[arrays[f"{piece}.{part}"] for part in range(3)] for piece in range(len(arrays) // 3)]
        return pieces, {name: values.get(name) for name in ("error", "weighted_error")}

    def forget(self, output: OutputTensor) -> None:
        """Delete the stored arrays of a written tensor."""
        self._journal.forget(_unit(output))


def _unit(output: OutputTensor) -> str:
    return f"gptq {output.name}"


def _notes(values: list[Values]) -> tuple[str, ...]:
    pieces, fitted, unseen = (sum(each.get(key, 0) for each in values) for key in ("pieces", "fitted", "unseen"))
    notes = []
    if fitted:
        notes.append(f"{fitted} of {pieces} matrices keep the weighted fit: it loses less than GPTQ on texts kept aside")
    if unseen:
        notes.append(f"{unseen} of {pieces} experts keep the weighted fit: they saw too few tokens for GPTQ")
    return tuple(notes)


@dataclass(slots=True)
class _PlaceInputs:
    """Inputs of one place: H, or for experts the inputs themselves, from which each expert's H is made."""

    can_suffice: bool
    """True if an expert could see enough tokens."""
    moments: Moments = field(default_factory=Moments)
    """Sums over the inputs of experts."""
    sums: np.ndarray | None = None
    """float32 `[in, in]`: the sum of `x x^T`."""
    count: int = 0
    """Number of inputs in `sums`."""
    rows: list[np.ndarray] = field(default_factory=list)
    """Inputs of experts, float32 `[n, in]`."""
    chosen: list[np.ndarray] = field(default_factory=list)
    """Experts chosen for them `[n, k]`."""
    aside: list[np.ndarray] = field(default_factory=list)
    """Validation inputs, float32 `[n, in]`."""
    chosen_aside: list[np.ndarray] = field(default_factory=list)
    """Experts chosen for these `[n, k]`."""

    def add(self, x: mx.array, experts: mx.array | None, expert_count: int, held_out: bool) -> None:
        flat = x.reshape(-1, x.shape[-1]).astype(mx.float32)
        if experts is None:
            if held_out:
                self.aside.append(_thinned(flat))
                return
            if self.sums is None:
                self.sums = np.zeros((x.shape[-1], x.shape[-1]), np.float32)
            add_gram(self.sums, flat)
            self.count += flat.shape[0]
            return
        self.moments.add(x, experts, expert_count)
        if self.can_suffice:
            shared = flat.shape[0] != experts.size
            which = np.array(experts).reshape(-1, experts.shape[-1] if shared else 1)
            (self.aside if held_out else self.rows).append(np.array(flat))
            (self.chosen_aside if held_out else self.chosen).append(which)

    def of_expert(self, expert: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the inputs of one expert, and its validation inputs, `[n, in]`."""
        return _inputs_of_expert(self.rows, self.chosen, expert), _inputs_of_expert(self.aside, self.chosen_aside, expert)[:_HELD_OUT]


def _thinned(rows: mx.array) -> np.ndarray:
    return to_numpy(rows[:: -(-rows.shape[0] // _HELD_OUT)])


def _inputs_of_expert(rows: list[np.ndarray], chosen: list[np.ndarray], expert: int) -> np.ndarray:
    found = [part[(which == expert).any(-1)] for part, which in zip(rows, chosen, strict=True)]
    return np.concatenate(found) if found else np.zeros((0, 0), np.float32)


class _Encoder:
    """A `Watcher` that encodes the matrices of each part after all texts passed it."""

    def __init__(self, checkpoint: Checkpoint, planned: ConversionPlan, journal: Journal, tokens: int) -> None:
        self._checkpoint, self._journal, self._tokens = checkpoint, journal, tokens
        self._outputs = {output.request.name: output for output in planned.outputs if is_planned(output)}

    def recorder(self, names: list[str]) -> _PlaceInputs | None:
        wanted = [self._outputs[name] for name in names if name in self._outputs]
        return _PlaceInputs(self._tokens >= _LEAST_SEEN * wanted[0].request.shape[-1]) if wanted else None

    def finish(self, places: list[tuple[list[str], InputRecorder]]) -> None:
        for names, inputs in places:
            assert isinstance(inputs, _PlaceInputs)
            wanted = [self._outputs[name] for name in names if name in self._outputs]
            left = [output for output in wanted if self._journal.done(_unit(output)) is None]
            if not left:
                continue
            rounders = _Rounders(inputs, names[0])
            inputs.sums = None
            for output in left:
                self._encode(output, rounders)
            mx.clear_cache()

    def _encode(self, output: OutputTensor, rounders: _Rounders) -> None:
        rounding = _Rounding(output, rounders)
        quantizer = Quantizer(output, rounders.importance, encode=rounding)
        arrays = {}
        for number, block in enumerate(blocks(self._checkpoint, output.request)):
            for part, array in enumerate(quantizer(block)):
                arrays[f"{number}.{part}"] = array
        errors = {"error": quantizer.error, "weighted_error": quantizer.weighted_error}
        values = {**errors, "pieces": rounding.pieces, "fitted": rounding.fitted, "unseen": rounding.unseen}
        self._journal.save(_unit(output), arrays, values)


@dataclass(frozen=True, slots=True)
class _Rounder:
    """Statistics for rounding the rows of one matrix."""

    importance: mx.array
    """For the weighted fit, float32 `[in]`."""
    factor: Factor | None
    """For GPTQ; None if too few tokens were seen."""
    aside: np.ndarray
    """Validation inputs, float32 `[n, in]`."""


class _Rounders:
    """The rounders of one place: a single one, or one per expert, made on request."""

    def __init__(self, inputs: _PlaceInputs, name: str) -> None:
        self._inputs, self._name = inputs, name
        self._last: tuple[int, _Rounder] | None = None
        self._means = inputs.moments.mean()
        if inputs.sums is not None:
            inputs.sums /= max(inputs.count, 1)
            factor = factorize(inputs.sums, name)
            self._last = 0, _Rounder(factor.importance, factor, _validation_inputs(inputs.aside))

    @property
    def importance(self) -> mx.array | None:
        """Mean squares of the inputs, float32 `[in]` or `[experts, in]`; None without inputs."""
        if self._means is not None:
            return self._means
        return self._last[1].importance if self._last else None

    def of(self, expert: int) -> _Rounder:
        if self._last is None or (self._last[0] != expert and self._means is not None):
            self._last = expert, self._of_expert(expert)
        return self._last[1]

    def _of_expert(self, expert: int) -> _Rounder:
        assert self._means is not None
        rows, aside = self._inputs.of_expert(expert)
        columns = self._means.shape[-1]
        if len(rows) < _LEAST_SEEN * columns:
            return _Rounder(self._means[expert], None, aside)
        sums = np.zeros((columns, columns), np.float32)
        add_gram(sums, mx.array(rows))
        factor = factorize(sums / len(rows), self._name)
        return _Rounder(factor.importance, factor, aside)


def _validation_inputs(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts)[:: -(-sum(map(len, parts)) // _HELD_OUT)] if parts else np.zeros((0, 0))


class _Rounding:
    """Rounds the rows of one tensor in order, each expert's with its own rounder, and counts the decisions."""

    def __init__(self, output: OutputTensor, rounders: _Rounders) -> None:
        assert isinstance(output.target, Format)
        self._form, self._rounders = output.target, rounders
        self._rows = output.request.shape[-2]
        self._first = 0
        """Number of the next row."""
        self.pieces = self.fitted = self.unseen = 0

    def __call__(self, weight: mx.array, form: Format, importance: mx.array | None) -> Quantized:
        """Round the next rows. Implements `quantizer.Encode`; the rounders have their own importance."""
        found = [self._rounded(weight[start:stop], expert) for expert, start, stop in self._runs(self._first, weight.shape[0])]
        self._first += weight.shape[0]
        codes, scales, biases = (mx.concatenate(list(parts)) for parts in zip(*found, strict=True))
        return Quantized(pack_codes(codes, self._form.bits), scales, biases, self._form)

    def _runs(self, first: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Yield (expert, first row, end) of the rows of each expert in this block."""
        at = first
        while at < first + count:
            expert = at // self._rows
            end = min((expert + 1) * self._rows, first + count)
            yield expert, at - first, end - first
            at = end

    def _rounded(self, weight: mx.array, expert: int) -> Parts:
        rounder = self._rounders.of(expert)
        fitted = fit_parts(weight, self._form, rounder.importance)
        self.pieces += 1
        if rounder.factor is None:
            self.unseen += 1
            return fitted
        fed_back = encode_with_feedback(weight, self._form, rounder.factor, fitted)
        if self._loss(weight, fitted, rounder) <= self._loss(weight, fed_back, rounder):
            self.fitted += 1
            return fitted
        return fed_back

    def _loss(self, weight: mx.array, parts: Parts, rounder: _Rounder) -> float:
        """Return the squared error of the outputs for the validation inputs; 0 without any."""
        if not rounder.aside.size:
            return 0.0
        error = matmul(rounder.aside, (decode(parts, self._form.group_size) - to_numpy(weight)).T)
        return float(np.square(error, dtype=np.float64).sum())
