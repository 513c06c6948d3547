"""The next token of every row, in array operations on the device; no row looks at another.

A batch of rows with the same settings step after step is prepared once (`SamplingBatch`); a stage is left out when no row
needs it. The order is vLLM's: log-probabilities of the plain logits, bias, penalties, temperature, then the cuts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import mlx.core as mx
import numpy as np

from .. import kernels_cpu
from ..types import NEUTRAL, SamplingParams
from .logprobs import LogprobArrays, TokenLogprobs, logprobs_of

_MASK = 2**64 - 1


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


@dataclass(frozen=True, slots=True)
class Drafts:
    """Tokens proposed for each sequence."""

    counts: Sequence[int]
    """How many for each sequence."""
    tokens: mx.array
    """uint32 `[sum(counts)]`: one sequence's after another's."""


@dataclass(frozen=True, slots=True)
class RaggedRows:
    """Sequence s has `1 + counts[s]` rows, one after another: the first after what is known, each further one after one more draft."""

    drafts: Drafts
    """What is verified."""
    sequences: list[int] = field(init=False)
    """`[R]`: whose row it is."""
    behind: list[int] = field(init=False)
    """`[R]`: drafts that the row stands after."""
    plain: list[int] = field(init=False)
    """Rows of sequences without drafts."""

    def __post_init__(self) -> None:
        counts = self.drafts.counts
        object.__setattr__(self, "sequences", [s for s, count in enumerate(counts) for _ in range(count + 1)])
        object.__setattr__(self, "behind", [i for count in counts for i in range(count + 1)])
        starts = np.cumsum([0, *(count + 1 for count in counts)]).tolist()
        object.__setattr__(self, "plain", [start for start, count in zip(starts, counts, strict=False) if not count])

    @property
    def rows(self) -> mx.array:
        """`sequences` on the device."""
        return mx.array(self.sequences)

    def said(self) -> tuple[mx.array, mx.array]:
        """`(row, token)` pairs: the drafts that each row stands after."""
        rows: list[int] = []
        places: list[int] = []
        row = first = 0
        for count in self.drafts.counts:
            for behind in range(count + 1):
                rows += [row] * behind
                places += range(first, first + behind)
                row += 1
            first += count
        return mx.array(rows), self.drafts.tokens[mx.array(places)]


class Penalties:
    """What each sequence has said. `repetition_penalty` (Keskar et al., 2019) looks at prompt and answer, as Hugging Face and vLLM do;
    presence and frequency (OpenAI's) at the answer alone."""

    def __init__(self, rows: Sequence[Row], vocab_size: int) -> None:
        params = [row.params for row in rows]
        repetition = _values(params, "repetition_penalty")
        self._repeats = any(penalty != 1 for penalty in repetition)
        self._subtracts = any(p.presence_penalty or p.frequency_penalty for p in params)
        self._counts = _counts([row.answer for row in rows], vocab_size)
        for i, row in enumerate(rows):
            if row.pending_token is not None:
                self._counts = self._counts.at[mx.array([i]), row.pending_token].add(1)
        self._prompts = _counts([row.prompt for row in rows], vocab_size) > 0 if self._repeats else None
        self._rows = mx.arange(len(rows))
        self._repetition = _column(repetition)
        self._presence = _column([p.presence_penalty for p in params])
        self._frequency = _column([p.frequency_penalty for p in params])

    @staticmethod
    def of(rows: Sequence[Row], vocab_size: int) -> Penalties | None:
        params = [row.params for row in rows]
        repeats = any(penalty != 1 for penalty in _values(params, "repetition_penalty"))
        wanted = repeats or any(p.presence_penalty or p.frequency_penalty for p in params)
        return Penalties(rows, vocab_size) if wanted else None

    @property
    def arrays(self) -> list[mx.array]:
        return [self._counts]

    def count(self, tokens: mx.array, spread: RaggedRows | None = None) -> None:
        """Add what has just been chosen for the rows `[R]`; what was drafted is added with `say`, once it is known what holds."""
        rows = self._rows
        if spread is not None:
            if not spread.plain:
                return
            rows = mx.array([spread.sequences[row] for row in spread.plain])
            tokens = tokens[mx.array(spread.plain)]
        self._counts = self._counts.at[rows, tokens].add(1)

    def say(self, sequence: int, tokens: Sequence[int]) -> None:
        """Add tokens to what a sequence has said."""
        ids = mx.array(np.asarray(tokens, dtype=np.int32))
        self._counts = self._counts.at[mx.full(ids.shape, sequence, mx.int32), ids].add(1)

    def apply(self, logits: mx.array, spread: RaggedRows | None = None) -> mx.array:
        """Penalized float32 logits `[R, vocab]`: a row for each sequence, or as `spread` says."""
        counts = self._counts
        if spread is not None:
            counts = counts[spread.rows].at[spread.said()].add(1)
        said = counts > 0
        if self._prompts is not None:
            factor = mx.where(said | _take(self._prompts, spread), _take(self._repetition, spread), 1.0)
            logits = mx.where(logits > 0, logits / factor, logits * factor)
        if self._subtracts:
            logits = logits - _take(self._frequency, spread) * counts - _take(self._presence, spread) * said
        return logits


def _take(array: mx.array, spread: RaggedRows | None) -> mx.array:
    return array if spread is None else array[spread.rows]


def _counts(tokens: Sequence[Sequence[int]], vocab_size: int) -> mx.array:
    """How often each row's tokens occur, float32 `[R, vocab]`."""
    rows = np.repeat(np.arange(len(tokens)), [len(ids) for ids in tokens])
    flat = np.concatenate([np.asarray(ids, dtype=np.int64) for ids in tokens])
    counts = mx.zeros((len(tokens), vocab_size))
    return counts.at[mx.array(rows), mx.array(flat)].add(1) if flat.size else counts


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence to sample for."""

    params: SamplingParams
    """How to choose its tokens; fields that were left out are neutral."""
    seed: int
    """64 bits."""
    prompt: Sequence[int]
    """Token ids."""
    answer: Sequence[int]
    """Token ids, as far as the host has read them."""
    pending_token: mx.array | None = None
    """uint32 `[n]`: tokens after those, which are on the device only."""


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

    def __init__(self, rows: Sequence[Row], vocab_size: int) -> None:
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
        """Choose from float32 logits `[R, vocab]`. `positions[s]` is where the new token of sequence s will stand: with the seed it makes
        the row's noise. A row for each sequence; with drafts, one more for each of them (`RaggedRows`), chosen as if the drafts held.
        `allowed`: bits of the tokens that each row may take, uint32 `[R, ceil(vocab / 32)]`, lowest first."""
        spread = None if drafts is None else RaggedRows(drafts)
        settings, seeds, plain = self._settings, self._seeds, logits
        if spread is not None:
            settings = settings.spread(spread)
            seeds = [seeds[s] for s in spread.sequences]
            positions = [positions[s] + behind for s, behind in zip(spread.sequences, spread.behind, strict=True)]
        if allowed is not None:
            logits = _masked(logits, allowed)
        if settings.bias is not None:
            logits = logits + settings.bias
        if self._penalties is not None:
            logits = self._penalties.apply(logits, spread)
        tokens = settings.choose(logits, seeds, positions)
        if self._penalties is not None:
            self._penalties.count(tokens, spread)
            self._counted = [n + (drafts is None or not drafts.counts[s]) for s, n in enumerate(self._counted)]
        top = self._top_logprobs
        return Sampled(tokens, None if top is None else logprobs_of(plain, tokens, top))


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

    @staticmethod
    def of(params: Sequence[SamplingParams], vocab_size: int) -> Settings:
        greedy = [p.greedy for p in params]
        temperature = _column([value or 1.0 for value in _values(params, "temperature")])
        return Settings(
            mx.array(greedy)[:, None], all(greedy), any(greedy), temperature, Cuts.of(params, vocab_size), _bias(params, vocab_size)
        )

    def spread(self, spread: RaggedRows) -> Settings:
        bias = None if self.bias is None else self.bias[spread.rows]
        if self.all_greedy:
            return replace(self, bias=bias)
        rows = spread.rows
        cuts = None if self.cuts is None else self.cuts.spread(rows)
        return replace(self, greedy=self.greedy[rows], temperature=self.temperature[rows], cuts=cuts, bias=bias)

    def choose(self, logits: mx.array, seeds: Sequence[int], positions: Sequence[int]) -> mx.array:
        """A token for each row, uint32 `[R]`."""
        argmax = kernels_cpu.argmax if kernels_cpu.in_use() else _plain_argmax
        if self.all_greedy:
            return argmax(logits)
        scaled = logits / self.temperature
        if self.cuts is not None:
            scaled = self.cuts.apply(scaled)
        noisy = scaled + gumbel(row_keys(seeds, positions), logits.shape[-1])
        if self.any_greedy:
            noisy = mx.where(self.greedy, logits, noisy)
        return argmax(noisy)


@dataclass(frozen=True, slots=True)
class Cuts:
    """top-k, then top-p of what is left, and min-p: columns `[R, 1]`, switched off where they cut nothing."""

    top_k: mx.array | None
    """int32 `[rows, 1]`; None where no row has it."""
    top_p: mx.array | None
    """float32 `[rows, 1]`; None where no row has it."""
    log_min_p: mx.array | None
    """float32 `[rows, 1]`, the logarithm of min_p; None where no row has it."""

    @staticmethod
    def of(params: Sequence[SamplingParams], vocab_size: int) -> Cuts | None:
        ks = [k if k > 0 else vocab_size for k in _values(params, "top_k")]
        top_k = _column([min(k, vocab_size) for k in ks]) if any(k < vocab_size for k in ks) else None
        top_ps, min_ps = _values(params, "top_p"), _values(params, "min_p")
        top_p = _column(top_ps) if any(p < 1 for p in top_ps) else None
        min_p = _column([np.log(p) if p > 0 else -np.inf for p in min_ps]) if any(p > 0 for p in min_ps) else None
        return None if top_k is None and top_p is None and min_p is None else Cuts(top_k, top_p, min_p)

    def spread(self, rows: mx.array) -> Cuts:
        top_k, top_p, log_min_p = (None if c is None else c[rows] for c in (self.top_k, self.top_p, self.log_min_p))
        return Cuts(top_k, top_p, log_min_p)

    def apply(self, logits: mx.array) -> mx.array:
        """Logits `[R, vocab]` with everything below the cuts at minus infinity. Tokens tied at a cut stay together."""
        threshold = mx.full((logits.shape[0], 1), -mx.inf)
        if self.log_min_p is not None:
            threshold = mx.max(logits, axis=-1, keepdims=True) + self.log_min_p
        if self.top_k is not None or self.top_p is not None:
            threshold = mx.maximum(threshold, self._threshold(logits))
        return mx.where(logits < threshold, -mx.inf, logits)

    def _threshold(self, logits: mx.array) -> mx.array:
        if not kernels_cpu.in_use():
            return self._sorted_threshold(logits)
        rows, size = logits.shape
        top_k = mx.full((rows,), size) if self.top_k is None else self.top_k[:, 0]
        top_p = mx.ones((rows,)) if self.top_p is None else self.top_p[:, 0]
        return kernels_cpu.threshold(logits, top_k, top_p)[:, None]

    def _sorted_threshold(self, logits: mx.array) -> mx.array:
        ordered = -mx.sort(-logits, axis=-1)
        keep = mx.ones(ordered.shape, mx.bool_)
        if self.top_k is not None:
            keep = mx.arange(ordered.shape[-1])[None] < self.top_k
        if self.top_p is not None:
            probabilities = mx.softmax(mx.where(keep, ordered, -mx.inf), axis=-1)
            before = mx.cumsum(probabilities, axis=-1) - probabilities
            keep = keep & ((before < self.top_p) | (self.top_p >= 1))
        return mx.min(mx.where(keep, ordered, mx.inf), axis=-1, keepdims=True)


@mx.compile
def _masked(logits: mx.array, allowed: mx.array) -> mx.array:
    """Logits `[R, vocab]` with all tokens at minus infinity whose bit is not set."""
    bits = (allowed[:, :, None] >> mx.arange(32, dtype=mx.uint32)) & 1
    return mx.where(bits.reshape(allowed.shape[0], -1)[:, : logits.shape[1]].astype(mx.bool_), logits, -mx.inf)


def _plain_argmax(x: mx.array) -> mx.array:
    return mx.argmax(x, axis=-1)


def _values(params: Sequence[SamplingParams], name: str) -> list[float]:
    """A field of all rows, neutral where it was left out."""
    return [NEUTRAL[name] if (value := getattr(p, name)) is None else value for p in params]


def _column(values: Sequence[float]) -> mx.array:
    return mx.array(np.array(values, dtype=np.float32)[:, None])


def _bias(params: Sequence[SamplingParams], vocab_size: int) -> mx.array | None:
    if not any(p.logit_bias for p in params):
        return None
    bias = np.zeros((len(params), vocab_size), dtype=np.float32)
    for row, p in enumerate(params):
        for token, value in (p.logit_bias or {}).items():
            bias[row, token] = value
    return mx.array(bias)
