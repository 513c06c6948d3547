"""How memory is divided among the parts of a memory plan."""

from __future__ import annotations

from collections.abc import Callable

from ...cache.state import LEAST_BYTES
from ...util.dataclass import dataclass
from .step import StepSize

_MOST_REUSE = 2 * 2**30
_REUSE_SHARE = 0.25
"""Share of the room besides the weights for what is only kept in case a later prompt begins alike."""
_SHORT_REUSE_SHARE = 0.125
"""The same where the context is shorter than the model's for lack of memory."""
_SNAPSHOT_SHARE = {False: 0.125, True: 0.5}
"""Share of what is kept for reuse, by whether layers are recurrent: their states are large and cannot be found in the pool."""
_SEQUENCES_SHARE = 0.5
"""Share of the room, at most, for what running sequences take whatever their length: fewer run together where it would be more."""
_MOST_BUFFERS_SHARE = 0.75
_ENDLESS = 2**40
"""Stands for "unlimited": with only windows and recurrent states, further tokens cost no memory."""


@dataclass(frozen=True, slots=True)
class Demands:
    """What a model, or a model and its draft model, need: bytes, unless a field says otherwise."""

    weights: int
    """Weights."""
    load: int
    """Needed besides the weights while they are read."""
    step: StepSize
    """Peak of a step."""
    token: float
    """For each token of context, in layers without a window."""
    window_token: float
    """For each token that is kept for reuse, in layers with a window."""
    sequence: int
    """For each running sequence, whatever its length."""
    recurrent: bool
    """Whether a layer keeps a state that changes with every token."""
    weight_arrays: int
    """Arrays of weights, a count."""
    layer_arrays: int
    """Arrays of the cache, a count."""

    def __add__(self, other: Demands) -> Demands:
        return Demands(
            self.weights + other.weights,
            max(self.load, other.load),
            self.step + other.step,
            self.token + other.token,
            self.window_token + other.window_token,
            self.sequence + other.sequence,
            self.recurrent or other.recurrent,
            self.weight_arrays + other.weight_arrays,
            self.layer_arrays + other.layer_arrays,
        )


@dataclass(frozen=True, slots=True)
class Shares:
    """How the memory is divided."""

    context: int
    """Tokens that one sequence may have."""
    room_tokens: int
    """The same, if the model allowed any number."""
    pool_tokens: int
    """Tokens of the page pool."""
    sequences: int
    """Sequences that run together."""
    prefix_cache_tokens: int
    """Tokens of the pool that are kept for reuse."""
    snapshots: int
    """Bytes of snapshots."""
    step: int
    """Bytes of a step's peak."""
    growth: int
    """Bytes beyond those while the pool grows."""


def divide(demands: Demands, limit: int, wanted: int, sequences: int, *, prefix_cache: bool) -> Shares:
    """Divide `limit` bytes for a context of `wanted` tokens, or as many as fit, and `sequences` sequences at most."""
    shares = _divided(demands, limit, wanted, sequences, _REUSE_SHARE if prefix_cache else 0.0)
    if prefix_cache and shares.context < wanted:
        return _divided(demands, limit, wanted, sequences, _SHORT_REUSE_SHARE)
    return shares


def _divided(demands: Demands, limit: int, wanted: int, sequences: int, reuse: float) -> Shares:
    step = demands.step
    room = limit - demands.weights - step.at(0)
    if demands.sequence:
        sequences = max(min(sequences, int(room * _SEQUENCES_SHARE / demands.sequence)), 1)
    room -= sequences * demands.sequence
    kept = min(_MOST_REUSE, int(max(room, 0) * reuse))
    snapshots = int(kept * _SNAPSHOT_SHARE[demands.recurrent])
    token = demands.token + demands.window_token
    prefix_cache_tokens = int((kept - snapshots) / token) if token else 0
    room += step.at(0) - snapshots - int(prefix_cache_tokens * demands.window_token)

    def besides(context: int, pool: int) -> int:
        return step.at(context, sequences) + step.growth(context, sequences, pool)

    if demands.token:
        most = _largest(room, demands.token, lambda tokens: besides(tokens, tokens))
        context = min(wanted, most)
        pool = min(wanted * sequences + prefix_cache_tokens, _largest(room, demands.token, lambda tokens: besides(context, tokens)))
        prefix_cache_tokens = min(prefix_cache_tokens, pool)
    else:
        most = _ENDLESS if room > step.at(0) else 0
        context, pool = min(wanted, most), wanted * sequences + prefix_cache_tokens
    peak, growth = step.at(context, sequences), step.growth(context, sequences, pool)
    return Shares(context, most, pool, sequences, prefix_cache_tokens, snapshots, peak, growth)


def _largest(room: int, token: float, besides: Callable[[int], int]) -> int:
    """The most tokens that fit, if each takes `token` bytes, and so many of them `besides` bytes; 0 where none do."""
    fits, fails = 0, int(max(room, 0) / token) + 1
    while fails - fits > 1:
        middle = (fits + fails) // 2
        fits, fails = (middle, fails) if middle * token + besides(middle) <= room else (fits, middle)
    return fits


def within_buffers(demands: Demands, snapshots: int, limit: int | None) -> tuple[int, int]:
    """Bytes of snapshots, reduced where they could be too many arrays, and the most arrays that can be alive then."""
    fixed = demands.weight_arrays + demands.layer_arrays + demands.step.arrays
    if limit is not None:
        snapshots = min(snapshots, max(int(limit * _MOST_BUFFERS_SHARE) - fixed, 0) * LEAST_BYTES)
    return snapshots, fixed + snapshots // LEAST_BYTES
