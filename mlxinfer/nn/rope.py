"""Rotary position embeddings (arXiv:2104.09864) on a flat row of tokens, each with its own position.

The rotated pairs are `(i, i + dims / 2)` of the first `dims` channels of a head; channels beyond pass unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..cache.base import Rotation, Segment, Step
from ..util.dataclass import dataclass

Parameters = Mapping[str, Any]


def make_rope(parameters: Parameters, head_dim: int, max_positions: int) -> Rope:
    """Build a rope from validated parameters: `rope_type`, `rope_theta`, `partial_rotary_factor` and those of the type."""
    return ROPE_TYPES[parameters["rope_type"]](parameters, head_dim, max_positions)


def _plain_frequencies(parameters: Parameters, dims: int, theta: float | None = None) -> Frequencies:
    base = parameters["rope_theta"] if theta is None else theta
    return 1.0 / base ** (np.arange(0, dims, 2, dtype=np.float64) / dims)


def _rotated_dims(parameters: Parameters, head_dim: int) -> int:
    return int(head_dim * parameters["partial_rotary_factor"])


def _fixed_rope(frequencies: Frequencies, context: int, gain: float = 1.0) -> Rope:
    return Rope(2 * len(frequencies), context, lambda length: frequencies, lambda length: 0, gain)


def _default(parameters: Parameters, head_dim: int, max_positions: int) -> Rope:
    dims = _rotated_dims(parameters, head_dim)
    return _fixed_rope(_plain_frequencies(parameters, dims), max_positions)


def _linear(parameters: Parameters, head_dim: int, max_positions: int) -> Rope:
    dims = _rotated_dims(parameters, head_dim)
    factor = parameters["factor"]
    return _fixed_rope(_plain_frequencies(parameters, dims) / factor, int(factor * max_positions))


def _proportional(parameters: Parameters, head_dim: int, max_positions: int) -> Rope:
    """Partial rotation spread over the whole head: pairs beyond the rotated share do not rotate."""
    moving = int(parameters["partial_rotary_factor"] * head_dim // 2)
    frequencies = np.zeros(head_dim // 2)
    frequencies[:moving] = _plain_frequencies(parameters, head_dim)[:moving] / parameters.get("factor", 1.0)
    return _fixed_rope(frequencies, max_positions)


def _dynamic(parameters: Parameters, head_dim: int, max_positions: int) -> Rope:
    """The base grows with the sequence once it is longer than the trained context."""
    dims = _rotated_dims(parameters, head_dim)
    factor, theta = parameters["factor"], parameters["rope_theta"]

    def frequencies(length: int) -> Frequencies:
        stretch = factor * max(length, max_positions) / max_positions - (factor - 1)
        return _plain_frequencies(parameters, dims, theta * stretch ** (dims / (dims - 2)))

    return Rope(2 * ((dims + 1) // 2), int(factor * max_positions), frequencies, lambda length: max(length, max_positions))


def _ntk_alpha(parameters: Parameters, head_dim: int, max_positions: int) -> Rope:
    """The base is stretched by a fixed factor, whatever the length (Hunyuan)."""
    dims = _rotated_dims(parameters, head_dim)
    return _fixed_rope(
        _plain_frequencies(parameters, dims, parameters["rope_theta"] * parameters["alpha"] ** (dims / (dims - 2))), max_positions
    )


def _llama3(parameters: Parameters, head_dim: int, max_positions: int) -> Rope:
    """Stretch long waves by `factor`, keep short ones, and interpolate between them."""
    dims = _rotated_dims(parameters, head_dim)
    frequencies = _plain_frequencies(parameters, dims)
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = parameters["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return _fixed_rope(frequencies * ((1 - smooth) / parameters["factor"] + smooth), max_positions)


def _yarn(parameters: Parameters, head_dim: int, max_positions: int) -> Rope:
    dims = _rotated_dims(parameters, head_dim)
    original = parameters["original_max_position_embeddings"]
    factor = parameters.get("factor") or max_positions / original
    frequencies = _plain_frequencies(parameters, dims)
    low, high = _yarn_range(parameters, dims, original)
    ramp = np.clip((np.arange(len(frequencies)) - low) / (high - low), 0, 1)
    context = max(max_positions, int(factor * original))
    return _fixed_rope(frequencies * (ramp / factor + (1 - ramp)), context, _yarn_gain(parameters, factor))


def _yarn_range(parameters: Parameters, dims: int, original: int) -> tuple[float, float]:
    """The pairs between which interpolation fades in, by how often they turn within the trained context (arXiv:2309.00071)."""

    def pair_of(turns: float) -> float:
        return dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(parameters["rope_theta"]))

    low, high = pair_of(parameters.get("beta_fast") or 32), pair_of(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    return low, high + 0.001 if low == high else high


def yarn_scale(factor: float, multiplier: float) -> float:
    """Return the factor of attention scores when the context is stretched by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0


def _yarn_gain(parameters: Parameters, factor: float) -> float:
    def scale(multiplier: float) -> float:
        return yarn_scale(factor, multiplier)

    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)
    mscale, all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    computed = scale(mscale) / scale(all_dim) if mscale and all_dim else scale(1.0)
    # DeepSeek-R1-0528-Qwen3-8B undoes the gain with it. vLLM reads it so; transformers does not read it.
    return computed * float(parameters.get("attn_factor") or 1.0)


def _longrope(parameters: Parameters, head_dim: int, max_positions: int) -> Rope:
    """One set of divisors for sequences within the trained context, another for longer ones."""
    dims = _rotated_dims(parameters, head_dim)
    original = parameters["original_max_position_embeddings"]
    factor = parameters.get("factor") or max_positions / original
    gain = parameters.get("attention_factor")
    if gain is None:
        gain = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    plain = _plain_frequencies(parameters, dims)
    short = plain / np.array(parameters["short_factor"], np.float64)
    long = plain / np.array(parameters["long_factor"], np.float64)

    def frequencies(length: int) -> Frequencies:
        return long if length > original else short

    return Rope(2 * len(plain), max_positions, frequencies, lambda length: original + (length > original), float(gain), original)


ROPE_TYPES: dict[str, Callable[[Parameters, int, int], Rope]] = {
    "default": _default,
    "linear": _linear,
    "proportional": _proportional,
    "dynamic": _dynamic,
    "ntk_alpha": _ntk_alpha,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


Frequencies = NDArray[np.float64]
"""Radians per position, `[dims / 2]`."""


@dataclass(slots=True)
class Rope:
    """Rotation of query and key heads."""

    dims: int
    """Channels of a head that rotate."""
    context: int
    """Positions that the model is meant for."""
    frequencies: Callable[[int], Frequencies]
    """Radians per position, `[dims / 2]`, for a sequence of this length."""
    regime: Callable[[int], int]
    """A number that is equal for all lengths with the same frequencies."""
    gain: float = 1.0
    """Multiplies the rotated channels of queries and keys (yarn, longrope)."""
    boundary: int | None = None
    """Length beyond which every token of a sequence is rotated differently, including cached ones."""
    _last: tuple[int, Regime] | None = None

    def at(self, step: Step) -> Rotation:
        """The rotation for the rows of a step."""
        return RegimeRotation(step, self.dims, [self._regime(_final_length(segment)) for segment in step.segments])

    def _regime(self, length: int) -> Regime:
        """Nearly every step has the same regime as the step before."""
        key = self.regime(length)
        if self._last is None or self._last[0] != key:
            self._last = key, Regime(self.frequencies(length))
        return self._last[1]


def _final_length(segment: Segment) -> int:
    return max(segment.total, segment.past + segment.count)


RopePart = tuple[list[float], int, int]
"""Consecutive rows with consecutive positions: radians per position `[dims / 2]`, position of the first row, number of rows."""


class Regime:
    """Radians per position; on the device, and only when needed, as positions per radian."""

    def __init__(self, radians: Frequencies) -> None:
        self.radians = radians
        self.frequencies: list[float] = radians.tolist()

    @cached_property
    def periods(self) -> mx.array:
        with np.errstate(divide="ignore"):
            return mx.array((1 / self.radians).astype(np.float32))


class RegimeRotation:
    """Rotates all rows with one call if their segments share a regime, otherwise with cosines and sines."""

    def __init__(self, step: Step, dims: int, regimes: list[Regime]) -> None:
        self._step = step
        self._dims = dims
        self._regimes = regimes

    @property
    def parts(self) -> list[RopePart]:
        return [(r.frequencies, s.past, s.count) for s, r in zip(self._step.segments, self._regimes, strict=True)]

    def __call__(self, x: mx.array) -> mx.array:
        first = self._regimes[0]
        if any(regime is not first for regime in self._regimes):
            return self._row_by_row(x)
        return self._fast(x, self._step.positions)

    def _fast(self, x: mx.array, positions: mx.array) -> mx.array:
        rows, periods = x[:, :, None], self._regimes[0].periods
        return mx.fast.rope(rows, self._dims, traditional=False, base=None, scale=1.0, offset=positions, freqs=periods).squeeze(2)

    def _row_by_row(self, x: mx.array) -> mx.array:
        cos, sin = self.waves[:, :1], self.waves[:, 1:]
        half = cos.shape[-1]
        low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return mx.concatenate([low * cos - high * sin, high * cos + low * sin, rest], axis=-1).astype(x.dtype)

    @cached_property
    def waves(self) -> mx.array:
        """float32 `[T, 2, dims / 2]`, from angles in float64: positions are known to the host."""
        angles = [self._segment_angles(s, r) for s, r in zip(self._step.segments, self._regimes, strict=True)]
        whole = angles[0] if len(angles) == 1 else np.concatenate(angles)
        found = np.empty((whole.shape[0], 2, whole.shape[1]), np.float32)
        found[:, 0], found[:, 1] = np.cos(whole), np.sin(whole)
        return mx.array(found)

    def _segment_angles(self, segment: Segment, regime: Regime) -> NDArray[np.float64]:
        """Return float64 `[count, dims / 2]`."""
        return np.multiply.outer(np.arange(segment.past, segment.past + segment.count), regime.radians)
