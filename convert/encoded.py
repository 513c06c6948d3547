"""Encodes a model by GPTQ while it reads texts: each block of layers as soon as all texts have passed through it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from ..loading.checkpoint import Checkpoint
from ..loading.weights import Progress
from ..nn.weights import Format, Quantized
from .batches import BATCH, batches
from .bookmarks import JournalBookmarks
from .encoders import Parts, fit_parts, pack_codes
from .gptq import Factor, encode, factorize
from .importance import Moments
from .journal import Journal, Values
from .mapper import ConversionPlan, Output
from .products import add_gram, add_product, matmul, to_numpy
from .quantization_plan import is_planned
from .quantizer import Quantizer
from .reader import blocks
from .stream import Place, can_follow, read_through

_ASIDE = 16
"""One text of so many is kept aside, to judge by."""
_HELD_OUT = 512
"""Inputs of these that are remembered."""
FOLLOW = False
"""Whether texts pass through the rounded model as well, so that each matrix answers for what those before it have done to its inputs."""
_SHARE = 0.5
"""Share that is applied of the correction that least squares asks for: all of it would fit the tokens that were read."""
_CORRECTED_DAMPING = 0.01
"""Share of the mean of H's diagonal that is added to it for the correction."""
_LEAST_SEEN = 4
"""Tokens that an expert must have seen, for each of its columns: of fewer, H would remember the tokens, not what they have in common."""


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
    """All matrices that are to be rounded to an affine format, encoded by error feedback while the model reads these texts.

    `forward` is the same checkpoint, opened to compute with; `checkpoint` is read as it will be written. Where the inputs of texts kept
    aside say that the weighted fit loses less, it stays; experts that saw few tokens have it too. An interrupted run goes on at the block
    that it had begun. Raises `ConversionError` for inputs that became NaN, `MLXInferError` for what cannot be loaded, OSError.
    """
    done = journal.done("gptq")
    kept = {_unit(output) for output in planned.outputs if journal.done(_unit(output)) or journal.done(f"tensor {output.name}")}
    if done is None or not kept.issuperset(done["units"]):
        journal.forget("gptq")
        aside = max(len(texts) // _ASIDE, 1) if len(texts) > 1 else 0
        follows = FOLLOW and can_follow(forward.config)
        encoder = _Encoder(checkpoint, planned, journal, sum(map(len, texts)), follows=follows)
        bookmarks = JournalBookmarks(journal, "gptq states")
        rounded = encoder.rounded if follows else None
        read_through(forward, batches(texts, held_out=aside, size=batch), encoder, progress, bookmarks, rounded)
        journal.record("gptq", {"units": [_unit(output) for output in planned.outputs if journal.done(_unit(output))]})
        bookmarks.forget()
    return Encodings(journal, planned)


class Encodings:
    """Encoded tensors, kept in files until they are written."""

    def __init__(self, journal: Journal, planned: ConversionPlan) -> None:
        self._journal = journal
        values = [journal.done(_unit(output)) for output in planned.outputs]
        self.notes = _notes([each for each in values if each is not None])
        """Messages for the user."""

    def pieces(self, output: Output) -> tuple[list[list[mx.array]], dict[str, Any]] | None:
        """The arrays of one tensor, piece by piece, each in the order of `Output.parts`, and its relative errors; None where it was not
        encoded."""
        found = self._journal.load(_unit(output))
        if found is None:
            return None
        arrays, values = found
        pieces = [[arrays[f"{piece}.{part}"] for part in range(3)] for piece in range(len(arrays) // 3)]
        return pieces, {name: values.get(name) for name in ("error", "weighted_error")}

    def forget(self, output: Output) -> None:
        """It has been written."""
        self._journal.forget(_unit(output))


def _unit(output: Output) -> str:
    return f"gptq {output.name}"


def _notes(values: list[Values]) -> tuple[str, ...]:
    pieces, fitted, unseen, corrected = (sum(each.get(key, 0) for each in values) for key in ("pieces", "fitted", "unseen", "corrected"))
    notes = []
    if corrected:
        notes.append(f"{corrected} of {pieces} matrices make up for what those before them do to their inputs")
    if fitted:
        notes.append(f"{fitted} of {pieces} matrices keep the weighted fit: it loses less than GPTQ on texts kept aside")
    if unseen:
        notes.append(f"{unseen} of {pieces} experts keep the weighted fit: they saw too few tokens for GPTQ")
    return tuple(notes)


@dataclass(slots=True)
class _Inputs:
    """What came to one place: H, or for experts the inputs themselves, of which each expert makes its own."""

    can_suffice: bool
    """Whether an expert could see enough tokens."""
    follows: bool = False
    """Whether what comes through the rounded model counts, rather than what comes through the plain one."""
    moments: Moments = field(default_factory=Moments)
    """Sums over the inputs of experts."""
    sums: np.ndarray | None = None
    """float32 `[in, in]`: the sum of `x x^T`."""
    count: int = 0
    """Inputs in it."""
    rows: list[np.ndarray] = field(default_factory=list)
    """Inputs of experts, float32 `[n, in]`."""
    chosen: list[np.ndarray] = field(default_factory=list)
    """The experts of each `[n, k]`."""
    cross: np.ndarray | None = None
    """float32 `[in, in]`: the sum of `y x^T` of the plain model's inputs y, where another's count."""
    aside: list[np.ndarray] = field(default_factory=list)
    """Inputs of texts kept aside, float32 `[n, in]`."""
    aside_plain: list[np.ndarray] = field(default_factory=list)
    """For these, the plain model's inputs, where another's count."""
    plain: mx.array | None = None
    """Inputs of the batch that comes through the rounded model next."""
    chosen_aside: list[np.ndarray] = field(default_factory=list)
    """The experts of these `[n, k]`."""

    def add(self, x: mx.array, experts: mx.array | None, expert_count: int, held_out: bool) -> None:
        flat = x.reshape(-1, x.shape[-1]).astype(mx.float32)
        if not self.follows:
            self._count(flat, x, experts, expert_count, held_out)
        elif experts is None:
            self.plain = flat

    def follow(self, x: mx.array, experts: mx.array | None, expert_count: int, held_out: bool) -> None:
        flat = x.reshape(-1, x.shape[-1]).astype(mx.float32)
        self._count(flat, x, experts, expert_count, held_out)
        if self.plain is None or experts is not None:
            return
        if held_out:
            self.aside_plain.append(_thinned(self.plain))
        else:
            if self.cross is None:
                self.cross = np.zeros((x.shape[-1], x.shape[-1]), np.float32)
            add_product(self.cross, self.plain, flat)
        self.plain = None

    def _count(self, flat: mx.array, x: mx.array, experts: mx.array | None, expert_count: int, held_out: bool) -> None:
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
        """The inputs of one expert, and those kept aside, `[n, in]`."""
        return _chosen(self.rows, self.chosen, expert), _chosen(self.aside, self.chosen_aside, expert)[:_HELD_OUT]


def _thinned(rows: mx.array) -> np.ndarray:
    return to_numpy(rows[:: -(-rows.shape[0] // _HELD_OUT)])


def _chosen(rows: list[np.ndarray], chosen: list[np.ndarray], expert: int) -> np.ndarray:
    found = [part[(which == expert).any(-1)] for part, which in zip(rows, chosen, strict=True)]
    return np.concatenate(found) if found else np.zeros((0, 0), np.float32)


class _Encoder:
    """A `Watcher` that encodes the matrices of each part of a model as soon as it has been read through."""

    def __init__(self, checkpoint: Checkpoint, planned: ConversionPlan, journal: Journal, tokens: int, *, follows: bool) -> None:
        self._checkpoint, self._journal, self._tokens, self._follows = checkpoint, journal, tokens, follows
        self._outputs = {output.request.name: output for output in planned.outputs if is_planned(output)}

    def place(self, names: list[str]) -> _Inputs | None:
        wanted = [self._outputs[name] for name in names if name in self._outputs]
        return _Inputs(self._tokens >= _LEAST_SEEN * wanted[0].request.shape[-1], self._follows) if wanted else None

    def rounded(self, name: str) -> mx.array | None:
        """The numbers that a tensor was rounded to; None if it was not."""
        output = self._outputs.get(name)
        found = self._journal.load(_unit(output)) if output else None
        if output is None or found is None:
            return None
        assert isinstance(output.target, Format)
        arrays = found[0]
        packed, scales, biases = (mx.concatenate([arrays[f"{n}.{part}"] for n in range(len(arrays) // 3)]) for part in range(3))
        return Quantized(packed, scales, biases, output.target).dequantize(mx.float32).reshape(output.request.shape)

    def done(self, places: list[tuple[list[str], Place]]) -> None:
        for names, inputs in places:
            assert isinstance(inputs, _Inputs)
            wanted = [self._outputs[name] for name in names if name in self._outputs]
            left = [output for output in wanted if self._journal.done(_unit(output)) is None]
            if not left:
                continue
            if any(name.endswith(("embed_tokens.weight", "embeddings.weight")) for name in names):
                inputs.cross = None  # what it is as an embedding counts as well
            rounders = _Rounders(inputs, names[0])
            inputs.sums = inputs.cross = None
            for output in left:
                self._encode(output, rounders)
            mx.clear_cache()

    def _encode(self, output: Output, rounders: _Rounders) -> None:
        rounding = _Rounding(output, rounders)
        quantizer = Quantizer(output, rounders.importance, encode=rounding)
        arrays = {}
        for number, block in enumerate(blocks(self._checkpoint, output.request)):
            for part, array in enumerate(quantizer(block)):
                arrays[f"{number}.{part}"] = array
        errors = {"error": quantizer.error, "weighted_error": quantizer.weighted_error}
        values = {
            **errors,
            "pieces": rounding.pieces,
            "fitted": rounding.fitted,
            "unseen": rounding.unseen,
            "corrected": rounding.corrected,
        }
        self._journal.save(_unit(output), arrays, values)


@dataclass(frozen=True, slots=True)
class _Rounder:
    """How the rows of one matrix are rounded."""

    importance: mx.array
    """For the weighted fit, float32 `[in]`."""
    factor: Factor | None
    """For GPTQ; None where too few tokens were seen."""
    aside: np.ndarray
    """Inputs to judge by, float32 `[n, in]`."""
    aside_plain: np.ndarray | None = None
    """The plain model's inputs for these, if they differ."""
    correction: np.ndarray | None = None
    """float32 `[in, in]`: what is added to the matrix, as a multiple of itself, so that outputs are those of the plain model."""


class _Rounders:
    """The rounders of one place: a single one, or one for each expert, made when it is asked for."""

    def __init__(self, inputs: _Inputs, name: str) -> None:
        self._inputs, self._name = inputs, name
        self._last: tuple[int, _Rounder] | None = None
        self._means = inputs.moments.mean()
        if inputs.sums is not None:
            inputs.sums /= max(inputs.count, 1)
            factor = factorize(inputs.sums, name)
            aside, plain = _joined(inputs.aside), _joined(inputs.aside_plain)
            correction = None if inputs.cross is None else _correction(inputs.cross / max(inputs.count, 1), inputs.sums)
            self._last = 0, _Rounder(factor.importance, factor, aside, plain if plain.size else None, correction)

    @property
    def importance(self) -> mx.array | None:
        """Mean squares of the inputs, float32 `[in]` or `[experts, in]`; None where none came."""
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


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts)[:: -(-sum(map(len, parts)) // _HELD_OUT)] if parts else np.zeros((0, 0))


def _correction(cross: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """The matrix M for which W + W M has, of the inputs x, the outputs that W has of the plain inputs y: `(C - H) H^-1`, with
    `C = mean(y x^T)`; a share of it."""
    diagonal = sums.diagonal().astype(np.float64)
    roots = np.sqrt(np.where(diagonal > 0, diagonal, 1) + _CORRECTED_DAMPING * max(float(diagonal.mean()), 1e-30))
    damped = sums / roots / roots[:, None]
    np.fill_diagonal(damped, 1.0)
    found = np.linalg.solve(damped, ((cross - sums) / roots).T).T / roots
    return np.asarray(_SHARE * found, np.float32)


class _Rounding:
    """Rounds the rows of one tensor in turn, those of each expert by its own rounder, and counts what was done."""

    def __init__(self, output: Output, rounders: _Rounders) -> None:
        assert isinstance(output.target, Format)
        self._form, self._rounders = output.target, rounders
        self._rows = output.request.shape[-2]
        self.pieces = self.fitted = self.unseen = self.corrected = 0

    def __call__(self, weight: mx.array, first: int) -> Quantized:
        found = [self._rounded(weight[start:stop], expert) for expert, start, stop in self._runs(first, weight.shape[0])]
        codes, scales, biases = (mx.concatenate(list(parts)) for parts in zip(*found, strict=True))
        return Quantized(pack_codes(codes, self._form.bits), scales, biases, self._form)

    def _runs(self, first: int, count: int) -> Iterator[tuple[int, int, int]]:
        """(expert, first row, end) of what belongs to one expert, in rows of this block."""
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
        tried = [fitted, encode(weight, self._form, rounder.factor, fitted)]
        if rounder.correction is not None:
            plain = to_numpy(weight)
            corrected = mx.array(plain + plain @ rounder.correction).astype(weight.dtype)
            tried.append(encode(corrected, self._form, rounder.factor))
        losses = [self._loss(weight, each, rounder) for each in tried]
        best = int(np.argmin(losses))
        self.fitted += best == 0
        self.corrected += best == 2
        return tried[best]

    def _loss(self, weight: mx.array, parts: Parts, rounder: _Rounder) -> float:
        """The squared error of the outputs for the inputs kept aside; 0 where there are none."""
        if not rounder.aside.size:
            return 0.0
        codes, scales, biases = (to_numpy(part) for part in parts)
        size = self._form.group_size
        decoded = codes * np.repeat(scales, size, -1) + np.repeat(biases, size, -1)
        if rounder.aside_plain is None:
            error = matmul(rounder.aside, (decoded - to_numpy(weight)).T)
        else:
            error = matmul(rounder.aside, decoded.T) - matmul(rounder.aside_plain, to_numpy(weight).T)
        return float(np.square(error, dtype=np.float64).sum())
