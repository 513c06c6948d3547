"""The next token of every row, in array operations on the device; no row looks at another.

A batch of rows with the same settings step after step is prepared once (`SamplingBatch`); a stage is left out when no row
needs it. The order is vLLM's: log-probabilities of the plain logits, bias, penalties, temperature, then the cuts.
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
from .rows import Drafts, PickedRows, RaggedRows, Row, column, values
from .top_k_top_p import Cuts

SAMPLED_ROWS_AT_ONCE = 16
"""Rows that go through the stages of sampling together, at most: what these need in addition to the logits is bounded by it."""
_MASK = 2**64 - 1

Noise = Callable[[Sequence[int], Sequence[int], int], mx.array]
"""Seeds and positions of R rows, and n, to standard Gumbel noise `[R, n]`."""


def sample_seed(seed: int, index: int) -> int:
    """A 64-bit seed for sample `index` of a request: the SplitMix64 finaliser (Steele et al., 2014) of both."""
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def row_keys(seeds: Sequence[int], positions: Sequence[int]) -> mx.array:
    """A threefry key per row, uint32 `[R, 2]`."""
    mixed = [sample_seed(seed, position) for seed, position in zip(seeds, positions, strict=True)]
    # Not by way of numpy: a Ctrl-C that falls into that conversion is lost.
    return mx.array([[m & 0xFFFFFFFF, m >> 32] for m in mixed], dtype=mx.uint32)


def gumbel(keys: mx.array, size: int) -> mx.array:
    """Standard Gumbel noise `[R, size]`, row r from key r: the argmax of logits plus it is a sample of their softmax."""
    return mx.vmap(lambda key: mx.random.gumbel((size,), key=key))(keys)


def noisy(logits: mx.array, keys: mx.array) -> mx.array:
    """Logits `[R, vocab]`, the argmax of which is a sample."""
    return logits + gumbel(keys, logits.shape[-1])


def cut_and_noisy(logits: mx.array, lowest: mx.array, keys: mx.array) -> mx.array:
    """The same, without what is below `lowest` `[R, 1]`."""
    return noisy(mx.where(logits < lowest, -mx.inf, logits), keys)


def masked(logits: mx.array, allowed: mx.array) -> mx.array:
    """Logits `[R, vocab]` with all tokens at minus infinity whose bit in uint32 `[R, ceil(vocab / 32)]`, lowest first, is not set."""
    bits = (allowed[:, :, None] >> mx.arange(32, dtype=mx.uint32)) & 1
    return mx.where(bits.reshape(allowed.shape[0], -1)[:, : logits.shape[1]].astype(mx.bool_), logits, -mx.inf)


# A dozen launches as one: making uniform numbers of random bits, and Gumbel noise of those; and unpacking bits.
_noisy, _cut_and_noisy, _masked = (fused(each, shapeless=False) for each in (noisy, cut_and_noisy, masked))


@dataclass(frozen=True, slots=True)
class Sampled:
    """What was chosen for R rows. Nothing is evaluated yet."""

    tokens: mx.array
    """uint32 `[R]`."""
    logprobs: LogprobArrays | None
    """For all rows, if one asked for them."""

    @property
    def arrays(self) -> list[mx.array]:
        return [self.tokens] + ([] if self.logprobs is None else self.logprobs.arrays)

    def read(self) -> tuple[list[int], list[TokenLogprobs] | None]:
        """All rows, on the host: waits for the step."""
        mx.eval(self.arrays)
        return cast("list[int]", self.tokens.tolist()), None if self.logprobs is None else self.logprobs.read()


class SamplingBatch:
    """The settings of sequences as arrays. Rebuild it when the sequences change; `sample` advances each of them by one token, or verifies
    what was drafted for it."""

    def __init__(self, rows: Sequence[Row], vocab_size: int, noise: Noise | None = None) -> None:
        """`noise` draws that of the rows, where another batch needs the same."""
        self._noise = noise
        self._vocab_size = vocab_size
        params = [row.params for row in rows]
        self._seeds = [row.seed for row in rows]
        self._settings = Settings.of(params, vocab_size)
        self._penalties = Penalties.of(rows, vocab_size)
        self.size = len(rows)
        """Sequences."""
        self.counts_tokens = self._penalties is not None
        """Whether `catch_up` is of use."""
        self._counted = [
            len(row.prompt) + len(row.answer) + (0 if row.pending_token is None else row.pending_token.shape[0]) for row in rows
        ]
        wanted = [p.logprobs for p in params if p.logprobs is not None]
        self._top_logprobs = min(max(wanted), vocab_size) if wanted else None

    def catch_up(self, tokens: Sequence[Sequence[int]]) -> None:
        """Tell what is known of each sequence, prompt and answer: what holds of drafts is counted from there."""
        if self._penalties is not None:
            for i, (known, counted) in enumerate(zip(tokens, self._counted, strict=True)):
                if counted < len(known):
                    self._penalties.say(i, known[counted:])
                    self._counted[i] = len(known)

    def sample(self, logits: mx.array, positions: Sequence[int], drafts: Drafts | None = None, allowed: mx.array | None = None) -> Sampled:
        """Choose from logits `[R, vocab]`. `positions[s]` is where the new token of sequence s will stand: with the seed it makes
        the row's noise. A row for each sequence; with drafts, one more for each of them (`RaggedRows`), chosen as if the drafts held.
        `allowed`: bits of the tokens that each row may take, uint32 `[R, ceil(vocab / 32)]`, lowest first."""
        if self._is_plain and allowed is None:  # whatever was drafted
            argmax = self._settings.argmax
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
        sampled = pieces[0] if len(pieces) == 1 else _joined(pieces)
        if self._penalties is not None:
            self._penalties.count(sampled.tokens, spread)
            self._counted = [n + (drafts is None or not drafts.counts[s]) for s, n in enumerate(self._counted)]
        return sampled

    @property
    def _is_plain(self) -> bool:
        """Whether the likeliest token of each row is taken, and nothing else is asked for."""
        settings = self._settings
        return settings.all_greedy and settings.bias is None and self._penalties is None and self._top_logprobs is None

    @property
    def takes_columns(self) -> bool:
        """Whether `column` does: nothing but the logits themselves decides, and noise that is drawn apart."""
        settings = self._settings
        return settings.bias is None and self._penalties is None and (settings.all_greedy or self._noise is not None)

    def column(self, logits: mx.array, positions: Sequence[int], tokens: mx.array | None) -> mx.array:
        """Like `sample`, from the logits of some tokens only, float32 `[R, n]`: the chosen columns, uint32 `[R]`. `tokens`, int32 `[n]` or
        `[R, n]`, are theirs; None: all. What cuts keep is told from these alone."""

        def noise(seeds: Sequence[int], positions: Sequence[int], size: int) -> mx.array:
            assert self._noise is not None
            drawn = self._noise(seeds, positions, self._vocab_size)
            if tokens is None:
                return drawn
            return drawn[:, tokens] if tokens.ndim == 1 else mx.take_along_axis(drawn, tokens, axis=-1)

        return self._settings.choose(logits, self._seeds, positions, noise)

    def _choose(
        self, logits: mx.array, picked: PickedRows | None, seeds: Sequence[int], positions: Sequence[int], allowed: mx.array | None
    ) -> Sampled:
        settings, plain, top = self._settings, logits, self._top_logprobs
        if picked is not None:
            settings = settings.pick(picked)
        if allowed is not None:
            logits = (kernels_cpu.masked if kernels_cpu.can_mask() else _masked)(logits, allowed)
        if settings.bias is not None:
            logits = logits + settings.bias
        if self._penalties is not None:
            logits = self._penalties.apply(logits, picked)
        tokens = settings.choose(logits, seeds, positions, self._noise)
        return Sampled(tokens, None if top is None else logprobs_of(plain, tokens, top))


def _joined(pieces: Sequence[Sampled]) -> Sampled:
    tokens = mx.concatenate([piece.tokens for piece in pieces])
    found = [piece.logprobs for piece in pieces if piece.logprobs is not None]
    if not found:
        return Sampled(tokens, None)
    return Sampled(tokens, LogprobArrays(*(mx.concatenate(list(part)) for part in zip(*(one.arrays for one in found), strict=True))))


@dataclass(frozen=True, slots=True)
class Settings:
    """What rows are sampled with: columns `[R, 1]`, and `bias` `[R, vocab]`."""

    greedy: mx.array
    """bool: rows that take the likeliest token."""
    all_greedy: bool
    """Whether all rows do."""
    any_greedy: bool
    """Whether any row does."""
    temperature: mx.array
    """float32; 1 in greedy rows."""
    cuts: Cuts | None
    """None where no row cuts anything."""
    bias: mx.array | None
    """float32, added to the logits; None where no row has any."""
    argmax: Callable[[mx.array], mx.array]
    """From `[R, vocab]` to uint32 `[R]`; the CPU kernels' from float32."""

    @staticmethod
    def of(params: Sequence[SamplingParams], vocab_size: int) -> Settings:
        greedy = [p.greedy for p in params]
        temperature = column([value or 1.0 for value in values(params, "temperature")])
        argmax = kernels_cpu.argmax if kernels_cpu.in_use() else _plain_argmax
        cuts, bias = Cuts.of(params, vocab_size), _bias(params, vocab_size)
        return Settings(mx.array(greedy)[:, None], all(greedy), any(greedy), temperature, cuts, bias, argmax)

    def pick(self, picked: PickedRows) -> Settings:
        """Those of some rows."""
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
