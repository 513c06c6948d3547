"""Chooses the next token of every row in array operations on the device; rows are independent.

A `SamplingBatch` prepares the parameters of its sequences once for many steps. A stage runs only if a row needs it. The order is vLLM's:
log-probabilities of the plain logits, bias, penalties, temperature, then top-k, top-p and min-p.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import mlx.core as mx
import numpy as np

from .. import kernels_cpu
from ..nn.activations import fused
from ..types import SamplingParams
from ..util.dataclass import dataclass
from .logprobs import LogprobArrays, TokenLogprobs, logprobs_of
from .penalties import Penalties
from .rows import Drafts, PickedRows, RaggedRows, SampledSequence, column, values
from .top_k_top_p import Cuts

SAMPLED_ROWS_AT_ONCE = 16
"""Most rows that are sampled together: bounds the memory of the stages."""
_MASK = 2**64 - 1

Noise = Callable[[Sequence[int], Sequence[int], int], mx.array]
"""From seeds and positions of R rows, and n, to standard Gumbel noise `[R, n]`."""


def sample_seed(seed: int, index: int) -> int:
    """A 64-bit seed for sample `index` of a request: the SplitMix64 finaliser (Steele et al., 2014) of both."""
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def row_keys(seeds: Sequence[int], positions: Sequence[int]) -> mx.array:
    """A threefry key per row, uint32 `[R, 2]`."""
    mixed = [sample_seed(seed, position) for seed, position in zip(seeds, positions, strict=True)]
    # Not by way of NumPy: a Ctrl-C during that conversion is lost.
    return mx.array([[m & 0xFFFFFFFF, m >> 32] for m in mixed], dtype=mx.uint32)


def gumbel(keys: mx.array, size: int) -> mx.array:
    """Standard Gumbel noise `[R, size]`, row r from key r: the argmax of logits plus it is a sample of their softmax."""
    return mx.vmap(lambda key: mx.random.gumbel((size,), key=key))(keys)


def noisy(logits: mx.array, keys: mx.array) -> mx.array:
    """Logits `[R, vocab]` plus noise: their argmax is a sample."""
    return logits + gumbel(keys, logits.shape[-1])


def cut_and_noisy(logits: mx.array, lowest: mx.array, keys: mx.array) -> mx.array:
    """`noisy`, with logits below `lowest` `[R, 1]` excluded."""
    return noisy(mx.where(logits < lowest, -mx.inf, logits), keys)


def masked(logits: mx.array, allowed: mx.array) -> mx.array:
    """Logits `[R, vocab]`, minus infinity for tokens whose bit in `allowed` is 0: uint32 `[R, ceil(vocab / 32)]`, lowest first."""
    bits = (allowed[:, :, None] >> mx.arange(32, dtype=mx.uint32)) & 1
    return mx.where(bits.reshape(allowed.shape[0], -1)[:, : logits.shape[1]].astype(mx.bool_), logits, -mx.inf)


# Each fuses a dozen launches.
_noisy, _cut_and_noisy, _masked = (fused(each, shapeless=False) for each in (noisy, cut_and_noisy, masked))


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens chosen for R rows, not evaluated yet."""

    tokens: mx.array
    """uint32 `[R]`."""
    logprobs: LogprobArrays | None
    """Of all rows, if one wants them."""

    @property
    def arrays(self) -> list[mx.array]:
        return [self.tokens] + ([] if self.logprobs is None else self.logprobs.arrays)

    def read(self) -> tuple[list[int], list[TokenLogprobs] | None]:
        """Tokens and log-probabilities of all rows, on the host. Waits for the step."""
        mx.eval(self.arrays)
        return cast("list[int]", self.tokens.tolist()), None if self.logprobs is None else self.logprobs.read()


_MOST_KEPT = 32
"""Rows of noise that are kept at most."""


class KeptNoise:
    """Noise that a draft and the row that verifies it share, drawn once. On a CPU, drawing a row of 50,000 numbers takes a twentieth of a
    step of a model with 135 million weights."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int, int], mx.array] = {}

    def draw(self, seeds: Sequence[int], positions: Sequence[int], size: int) -> mx.array:
        """`Noise` of drafts, kept for `take`."""
        drawn = gumbel(row_keys(seeds, positions), size)
        if len(self._kept) + len(seeds) > _MOST_KEPT:
            self._kept.clear()  # drafts that were never verified
        if len(seeds) > _MOST_KEPT:
            return drawn
        self._kept.update({(seed, at, size): drawn[i] for i, (seed, at) in enumerate(zip(seeds, positions, strict=True))})
        return drawn

    def take(self, seeds: Sequence[int], positions: Sequence[int], size: int) -> mx.array:
        """`Noise` of rows: kept noise where there is some, fresh noise for the others."""
        rows = [self._kept.pop((seed, at, size), None) for seed, at in zip(seeds, positions, strict=True)]
        missing = [i for i, row in enumerate(rows) if row is None]
        if not missing:
            return mx.stack([row for row in rows if row is not None])
        drawn = gumbel(row_keys([seeds[i] for i in missing], [positions[i] for i in missing]), size)
        if len(missing) == len(rows):
            return drawn
        left = iter([drawn[i] for i in range(len(missing))])
        return mx.stack([next(left) if row is None else row for row in rows])


class SamplingBatch:
    """The parameters of sequences as arrays. Create another one when the sequences change. `sample` advances each sequence by one token, or
    verifies its drafts."""

    def __init__(
        self,
        sequences: Sequence[SampledSequence],
        vocab_size: int,
        noise: Noise | None = None,
        drafts: Sequence[Sequence[mx.array]] | None = None,
    ) -> None:
        """`noise` draws the noise of the rows, if other batches need the same. With `drafts`, the rows follow these tokens of each
        sequence, uint32 `[1]` each; the host must have read all tokens before."""
        self._noise = noise
        self._vocab_size = vocab_size
        params = [s.params for s in sequences]
        self._seeds = [s.seed for s in sequences]
        self._columns = SamplingColumns.of(params, vocab_size)
        self._penalties: Penalties | None = None
        if _has_penalty(params):
            unread = [s.pending_token for s in sequences] if drafts is None else [mx.concatenate(list(d)) if d else None for d in drafts]
            self._penalties = Penalties(sequences, unread, vocab_size)
        self.size = len(sequences)
        """Number of sequences."""
        self.counts_tokens = self._penalties is not None
        """True if `catch_up` must be called."""
        wanted = [p.logprobs for p in params if p.logprobs is not None]
        self._top_logprobs = min(max(wanted), vocab_size) if wanted else None

    def catch_up(self, tokens: Sequence[Sequence[int]]) -> None:
        """Count tokens of each sequence (prompt and answer) that were not counted yet: accepted drafts."""
        if self._penalties is not None:
            self._penalties.catch_up(tokens)

    def sample(self, logits: mx.array, positions: Sequence[int], drafts: Drafts | None = None, allowed: mx.array | None = None) -> Sampled:
        """Choose tokens from logits `[R, vocab]`: a row for each sequence, and one more for each draft (`RaggedRows`), chosen as if the
        drafts were right. `positions[s]` is the position of the new token of sequence s; with the seed it determines the row's noise.
        `allowed`: bits of the tokens that each row may take, uint32 `[R, ceil(vocab / 32)]`, lowest first."""
        if self._is_plain and allowed is None:  # drafts change nothing then
            argmax = self._columns.argmax
            return Sampled(argmax(logits if argmax is _plain_argmax else logits.astype(mx.float32)), None)
        logits = logits.astype(mx.float32)
        spread, seeds, rows = None if drafts is None else RaggedRows(drafts), self._seeds, logits.shape[0]
        if spread is not None:
            seeds = [seeds[s] for s in spread.sequences]
            positions = [positions[s] + behind for s, behind in zip(spread.sequences, spread.behind, strict=True)]
        pieces: list[Sampled] = []
        size = SAMPLED_ROWS_AT_ONCE
        for start in range(0, rows, size):
            part = slice(start, start + size)
            picked: PickedRows | None = None
            if spread is not None:
                picked = spread.part(part.start, part.stop)
            elif size < rows:
                picked = PickedRows(list(range(rows)[part]))
            held = None if allowed is None else allowed[part]
            pieces.append(self._choose(logits if size >= rows else logits[part], picked, seeds[part], positions[part], held))
        sampled = pieces[0] if len(pieces) == 1 else _concatenated(pieces)
        if self._penalties is not None:
            self._penalties.count(sampled.tokens, spread)
        return sampled

    @property
    def _is_plain(self) -> bool:
        """True if each row takes its likeliest token and nothing else is wanted."""
        columns = self._columns
        return columns.all_greedy and columns.bias is None and self._penalties is None and self._top_logprobs is None

    @property
    def takes_columns(self) -> bool:
        """True if `column` can be used: tokens depend on nothing but their logits and noise that is drawn separately."""
        columns = self._columns
        return columns.bias is None and self._penalties is None and (columns.all_greedy or self._noise is not None)

    def column(self, logits: mx.array, positions: Sequence[int], tokens: mx.array | None) -> mx.array:
        """Choose columns from the logits of some tokens, float32 `[R, n]`; uint32 `[R]`. `tokens`: the columns' token ids, int32 `[n]` or
        `[R, n]`; None for the whole vocabulary. Top-k and top-p see these columns only."""

        def noise(seeds: Sequence[int], positions: Sequence[int], size: int) -> mx.array:
            assert self._noise is not None
            drawn = self._noise(seeds, positions, self._vocab_size)
            if tokens is None:
                return drawn
            return drawn[:, tokens] if tokens.ndim == 1 else mx.take_along_axis(drawn, tokens, axis=-1)

        return self._columns.choose(logits, self._seeds, positions, noise)

    def _choose(
        self, logits: mx.array, picked: PickedRows | None, seeds: Sequence[int], positions: Sequence[int], allowed: mx.array | None
    ) -> Sampled:
        columns, plain, top = self._columns, logits, self._top_logprobs
        if picked is not None:
            columns = columns.pick(picked)
        if allowed is not None:
            logits = (kernels_cpu.masked if kernels_cpu.can_mask() else _masked)(logits, allowed)
        if columns.bias is not None:
            logits = logits + columns.bias
        if self._penalties is not None:
            logits = self._penalties.apply(logits, picked)
        tokens = columns.choose(logits, seeds, positions, self._noise)
        return Sampled(tokens, None if top is None else logprobs_of(plain, tokens, top))


def _has_penalty(params: Sequence[SamplingParams]) -> bool:
    return any(p.presence_penalty or p.frequency_penalty or p.repetition_penalty not in (None, 1) for p in params)


def _concatenated(pieces: Sequence[Sampled]) -> Sampled:
    tokens = mx.concatenate([piece.tokens for piece in pieces])
    found = [piece.logprobs for piece in pieces if piece.logprobs is not None]
    if not found:
        return Sampled(tokens, None)
    return Sampled(tokens, LogprobArrays(*(mx.concatenate(list(part)) for part in zip(*(one.arrays for one in found), strict=True))))


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """Sampling parameters of rows: columns `[R, 1]`, and `bias` `[R, vocab]`."""

    greedy: mx.array
    """bool: True for rows that take the likeliest token."""
    all_greedy: bool
    any_greedy: bool
    temperature: mx.array
    """float32; 1 in greedy rows."""
    cuts: Cuts | None
    """Top-k, top-p and min-p; None if no row has any."""
    bias: mx.array | None
    """float32, added to the logits; None if no row has a bias."""
    argmax: Callable[[mx.array], mx.array]
    """From `[R, vocab]` to uint32 `[R]`; the CPU kernels' argmax needs float32."""

    @staticmethod
    def of(params: Sequence[SamplingParams], vocab_size: int) -> SamplingColumns:
        greedy = [p.greedy for p in params]
        temperature = column([value or 1.0 for value in values(params, "temperature")])
        argmax = kernels_cpu.argmax if kernels_cpu.in_use() else _plain_argmax
        cuts, bias = Cuts.of(params, vocab_size), _bias(params, vocab_size)
        return SamplingColumns(mx.array(greedy)[:, None], all(greedy), any(greedy), temperature, cuts, bias, argmax)

    def pick(self, picked: PickedRows) -> SamplingColumns:
        """The parameters of some rows."""
        bias = None if self.bias is None else self.bias[picked.rows]
        if self.all_greedy:
            return replace(self, bias=bias)
        rows = picked.rows
        cuts = None if self.cuts is None else self.cuts.pick(picked)
        return replace(self, greedy=self.greedy[rows], temperature=self.temperature[rows], cuts=cuts, bias=bias)

    def choose(self, logits: mx.array, seeds: Sequence[int], positions: Sequence[int], noise: Noise | None = None) -> mx.array:
        """A token for each row, uint32 `[R]`."""
        if self.all_greedy:
            return self.argmax(logits)
        scaled = logits / self.temperature
        if noise is not None:
            kept = scaled if self.cuts is None else mx.where(scaled < self.cuts.threshold(scaled), -mx.inf, scaled)
            noisy = kept + noise(seeds, positions, scaled.shape[-1])
        elif self.cuts is None:
            noisy = _noisy(scaled, row_keys(seeds, positions))
        else:
            noisy = _cut_and_noisy(scaled, self.cuts.threshold(scaled), row_keys(seeds, positions))
        if self.any_greedy:
            noisy = mx.where(self.greedy, logits, noisy)
        return self.argmax(noisy)


def _plain_argmax(x: mx.array) -> mx.array:
    return mx.argmax(x, axis=-1)


def _bias(params: Sequence[SamplingParams], vocab_size: int) -> mx.array | None:
    if not any(p.logit_bias for p in params):
        return None
    bias = np.zeros((len(params), vocab_size), dtype=np.float32)
    for row, p in enumerate(params):
        for token, value in (p.logit_bias or {}).items():
            bias[row, token] = value
    return mx.array(bias)
