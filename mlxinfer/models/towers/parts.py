"""Parts that vision towers share: patches as products, attention within images, rotary positions of two axes, blocks.

Rows are flat, `[batch * n, channels]`: `batch` images or windows of `n` patches each. Attention is never masked: rows attend to their own
`n` only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from ... import kernels_cpu
from ...cache.attention.reference_chunks import FUSED_DIMS
from ...nn.activations import Activated, elementwise, fused, gated, gelu_tanh
from ...nn.linear import JoinedLinear, Linear
from ...nn.norms import RMSNorm
from ...nn.weights import Matrix, Recipe, Weights, map_rows, numbers
from ...util.dataclass import dataclass
from ...util.device import is_gpu

Floats = np.ndarray[Any, np.dtype[np.float32]]
Ints = np.ndarray[Any, np.dtype[np.int64]]
_SCORES = 1 << 24
"""Maximum scores in memory at once where attention is not fused: 64 MiB in float32."""


def load_patches(weights: Weights, name: str, dims: int, patch: int, *, frames: int = 0, bias: bool = True, source: str = "") -> Linear:
    """Load a convolution whose stride is its kernel, as a matrix `[dims, 3 * (frames *) patch * patch]`.

    PyTorch stores `[dims, 3, (frames,) patch, patch]`, mlx-vlm `[dims, (frames,) patch, patch, 3]`.
    """
    kernel = (frames, patch, patch) if frames else (patch, patch)
    width = 3 * int(np.prod(kernel))

    def flat(sources: list[Matrix]) -> Matrix:
        return map_rows(sources[0], lambda weight: weight.reshape(dims, width))

    def channels_first(sources: list[Matrix]) -> Matrix:
        return map_rows(sources[0], lambda weight: mx.moveaxis(weight, -1, 1).reshape(dims, width))

    stored = (f"{source or name}.weight",)
    recipes = [Recipe(stored, ((dims, 3, *kernel),), flat), Recipe(stored, ((dims, *kernel, 3),), channels_first)]
    return Linear.load(weights, name, dims, width, bias=bias, otherwise=recipes, quantizable=False)


def patch_rows(pixels: mx.array, patch: int) -> mx.array:
    """Cut `[batch, 3, height, width]` into rows `[batch * n, 3 * patch * patch]`, row by row of each image.

    Pixels beyond the last whole patch are dropped, as a convolution does: SmolVLM 2.2B has patches of 14 in tiles of 384.
    """
    batch, channels, height, width = pixels.shape
    rows, columns = height // patch, width // patch
    cut = pixels[:, :, : rows * patch, : columns * patch].reshape(batch, channels, rows, patch, columns, patch)
    return cut.transpose(0, 2, 4, 1, 3, 5).reshape(-1, channels * patch * patch)


def load_table(weights: Weights, name: str, rows: int, dims: int) -> mx.array:
    """Load a table of positions `[rows, dims]` as float32; it may be stored quantized."""
    return numbers(weights.matrix(name, (rows, dims), quantizable=False))


def activation(name: str) -> Callable[[mx.array], mx.array]:
    """Return the activation with this config name, computed in float32. Raises `UnsupportedModelError`."""
    function = elementwise(name)
    if function.__name__ in kernels_cpu.ACTIVATIONS and kernels_cpu.can_compute_towers():
        return partial(kernels_cpu.activate, activation=function.__name__)
    exact = _gelu_tanh if function is gelu_tanh else function
    return fused(lambda x: exact(x.astype(mx.float32)).astype(x.dtype))


def _gelu_tanh(x: mx.array) -> mx.array:
    """Return `gelu_tanh` in fewer operations, since 1 + tanh(y) is 2 sigmoid(2 y): MLX compiles one kernel instead of three."""
    scale = 2 * math.sqrt(2 / math.pi)
    return x * mx.sigmoid(x * (scale + 0.044715 * scale * mx.square(x)))


def gate(name: str) -> Activated:
    """Return `activation(gate) * up`. Raises `UnsupportedModelError`."""
    known = gated(name)
    if known.activation not in kernels_cpu.ACTIVATIONS or not kernels_cpu.can_compute_towers():
        return known
    function = activation(name)
    return Activated(known.activation, lambda gate, up: function(gate) * up)


def merge_squares(x: mx.array, rows: int, columns: int, side: int) -> mx.array:
    """Concatenate the channels of `side x side` neighbours, row by row: `[batch * rows * columns, d]` to `[…, side * side * d]`."""
    width = x.shape[-1]
    cut = x.reshape(-1, rows // side, side, columns // side, side, width)
    return cut.transpose(0, 1, 3, 2, 4, 5).reshape(-1, side * side * width)


@dataclass(frozen=True, slots=True)
class PatchRotation:
    """Rotary positions of patches. Each of `parts` equal parts of a head rotates its own halves."""

    cos: mx.array
    """float32 `[n, d]`, or `[batch * n, d]` if the elements of a batch have different places."""
    sin: mx.array
    """The same shape."""
    parts: int = 1

    @classmethod
    def of(cls, angles: Floats, parts: int = 1) -> PatchRotation:
        """Take angles `[n, d]`."""
        return cls(mx.array(np.cos(angles)), mx.array(np.sin(angles)), parts)

    def __call__(self, x: mx.array) -> mx.array:
        """Rotate heads `[batch, n, heads, d]` in float32; returns them in their dtype."""
        shape = (-1, x.shape[1], 1, self.parts, x.shape[-1] // self.parts)
        parts = x.reshape(*x.shape[:-1], *shape[3:])
        return _rotate(parts, self.cos.reshape(shape), self.sin.reshape(shape)).reshape(x.shape)


def _rotate(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """Rotate pairs of the two halves of the last axis, a kernel for each half."""
    first, second = mx.split(x, 2, axis=-1)
    (cos_1, cos_2), (sin_1, sin_2) = mx.split(cos, 2, axis=-1), mx.split(sin, 2, axis=-1)
    return mx.concatenate([_minus(first, cos_1, second, sin_1), _plus(second, cos_2, first, sin_2)], axis=-1)


_minus = fused(lambda x, c, y, s: (x.astype(mx.float32) * c - y.astype(mx.float32) * s).astype(x.dtype))
_plus = fused(lambda x, c, y, s: (x.astype(mx.float32) * c + y.astype(mx.float32) * s).astype(x.dtype))


def attend(q: mx.array, k: mx.array, v: mx.array, scale: float, rotation: PatchRotation | None = None) -> mx.array:
    """Attend within each element of the batch: queries `[batch, n, heads, d]`, keys and values of as many or fewer heads.

    Returns `[batch * n, heads * d]`. Softmax is in float32. Where neither MLX nor the CPU kernels have a fused kernel, rows of queries are
    split so that at most `_SCORES` scores exist at once.
    """
    if kernels_cpu.can_compute_towers():
        turns, parts = ((rotation.cos, rotation.sin), rotation.parts) if rotation else (None, 1)
        return kernels_cpu.patch_attention(q, k, v, scale, turns, parts)
    if rotation is not None:
        q, k = rotation(q), rotation(k)
    batch, rows, heads, dim = q.shape
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    step = rows if is_gpu() and dim in FUSED_DIMS else max(1, _SCORES // (batch * heads * rows))
    found = [mx.fast.scaled_dot_product_attention(q[:, :, at : at + step], k, v, scale=scale) for at in range(0, rows, step)]
    y = found[0] if len(found) == 1 else mx.concatenate(found, axis=2)
    return y.swapaxes(1, 2).reshape(batch * rows, heads * dim)


def grid_positions(rows: int, columns: int, block: int = 1) -> tuple[Ints, Ints]:
    """Return (row, column) of each patch, row by row; with `block`, by squares of that side, and row by row within each."""
    row, column = np.mgrid[0:rows, 0:columns]
    cut = (rows // block, block, columns // block, block)
    return row.reshape(cut).transpose(0, 2, 1, 3).reshape(-1), column.reshape(cut).transpose(0, 2, 1, 3).reshape(-1)


def inverse_frequencies(dims: int, theta: float) -> Floats:
    """Return float32 `[dims / 2]`: `theta ** (-2i / dims)`."""
    found: Floats = (1 / np.float32(theta) ** (np.arange(0, dims, 2, dtype=np.float32) / np.float32(dims))).astype(np.float32)
    return found


Product = Callable[[mx.array], mx.array]
JoinedProduct = Callable[[mx.array], Sequence[mx.array]]
"""`[..., in]` to queries, keys and values, `[..., heads * d]` each."""
HeadsOperation = Callable[[mx.array, mx.array, mx.array], Sequence[mx.array]]
"""Queries, keys and values `[batch, n, heads, d]` to the same, normed."""


class PatchAttention:
    """Attention of patches within their image or window."""

    def __init__(
        self, qkv: JoinedProduct, output: Product, dim: int, *, scale: float | None = None, norm_heads: HeadsOperation | None = None
    ) -> None:
        self.qkv, self.output = qkv, output
        self.dim = dim
        self.scale = dim**-0.5 if scale is None else scale
        self.norm_heads = norm_heads

    def __call__(self, x: mx.array, batch: int, rotation: PatchRotation | None = None) -> mx.array:
        """`[batch * n, hidden]` to the same shape."""
        q, k, v = (y.reshape(batch, x.shape[0] // batch, -1, self.dim) for y in self.qkv(x))
        if self.norm_heads is not None:
            q, k, v = self.norm_heads(q, k, v)
        return self.output(attend(q, k, v, self.scale, rotation))


def load_attention(weights: Weights, names: Sequence[str], sizes: Sequence[int], dim: int, *, bias: bool) -> PatchAttention:
    """Load four matrices: of queries, keys and values, and of the output. `sizes` are their outputs."""
    hidden = sizes[3]
    inputs = (hidden, hidden, hidden, sizes[0])
    parts = [Linear.load(weights, name, size, wide, bias=bias) for name, size, wide in zip(names, sizes, inputs, strict=True)]
    return PatchAttention(JoinedLinear(parts[:3], sizes[:3]), parts[3], dim)


class VisionBlock:
    """A pre-norm block. `after` are optional operations on the results of attention and MLP: norms or scales."""

    def __init__(
        self,
        attention: PatchAttention,
        mlp: Callable[[mx.array], mx.array],
        norms: tuple[RMSNorm, RMSNorm],
        after: tuple[Callable[[mx.array], mx.array], Callable[[mx.array], mx.array]] | None = None,
    ) -> None:
        self.attention, self.mlp, self.norms, self.after = attention, mlp, norms, after

    def __call__(self, x: mx.array, batch: int, rotation: PatchRotation | None = None) -> mx.array:
        """`[batch * n, hidden]` to the same shape."""
        return self.feed_forward(x + self._after(0, self.attention(self.norms[0](x), batch, rotation)))

    def feed_forward(self, x: mx.array) -> mx.array:
        """Add the MLP's result."""
        return x + self._after(1, self.mlp(self.norms[1](x)))

    def _after(self, place: int, y: mx.array) -> mx.array:
        return y if self.after is None else self.after[place](y)
