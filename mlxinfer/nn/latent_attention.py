"""Multi-head latent attention (arXiv:2405.04434): keys and values of all heads are projections of one latent vector per token, the only
cached row. Queries are projected to latent vectors and answers from them, so attention has one KV head."""

from __future__ import annotations

import mlx.core as mx

from ..cache.base import AttentionParams, AttentionSpec, Rotation, Step
from ..util.dataclass import dataclass
from ..util.device import is_gpu
from .attention import Temperature, paired_by_halves
from .linear import Linear
from .moe import ExpertLinear
from .norms import RMSNorm
from .rope import Rope
from .small_batch_matmul import quantized_product
from .weights import Dense, Matrix, Quantized, Recipe, Weights, map_rows, numbers


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """Heads and widths."""

    hidden: int
    """Channels of the residual stream."""
    heads: int
    plain: int
    """Channels of a query head without rotation."""
    turned: int
    """Rotated channels, which the keys of all heads share."""
    value: int
    latent: int
    query_latent: int | None
    """Channels between the two projections of queries; None for a single projection."""

    @property
    def spec(self) -> AttentionSpec:
        """Keys are the latent vector and the rotated channels; values are the latent vector in them."""
        return AttentionSpec(1, self.latent + self.turned, self.latent, query_heads=self.heads, values_in_keys=True)


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """One layer of latent attention."""

    layer: int
    sizes: LatentSizes
    narrow: tuple[Linear, RMSNorm] | None
    """First of two projections of queries, and the norm after it."""
    queries: Linear
    """Projects to `[T, heads * (plain + turned)]`."""
    keys: Linear
    """`[latent + turned, hidden]`: projects to the latent vector and the rotated channels."""
    norm: RMSNorm
    into: ExpertLinear
    """Projects each head's queries to latent ones, `[heads, latent, plain]`."""
    out: ExpertLinear
    """Projects each head's latent answers to values, `[heads, value, latent]`."""
    output: Linear
    """`[hidden, heads * value]`."""
    scale: float
    gain: float
    """Factor of the rotated channels of queries: the square of the rope's gain; 1 without rotation."""
    temperature: Temperature | None = None

    @classmethod
    def load(
        cls,
        weights: Weights,
        name: str,
        layer: int,
        sizes: LatentSizes,
        rope: Rope | None,
        *,
        eps: float,
        bias: bool,
        scale: float,
        paired: bool,
        temperature: Temperature | None = None,
    ) -> LatentAttention:
        """Load the tensors under `name`. With `paired`, neighbouring channels rotate together. Without `rope` nothing rotates."""
        s, hidden = sizes, sizes.hidden
        narrow, source, part = None, hidden, "q_proj"
        if s.query_latent is not None:
            first = Linear.load(weights, f"{name}.q_a_proj", s.query_latent, hidden, bias=bias)
            narrow = first, RMSNorm.load(weights, f"{name}.q_a_layernorm", s.query_latent, eps)
            source, part = s.query_latent, "q_b_proj"
        queries = Linear.load(weights, f"{name}.{part}", s.heads * (s.plain + s.turned), source)
        keys = Linear.load(weights, f"{name}.kv_a_proj_with_mqa", s.latent + s.turned, hidden, bias=bias)
        if paired:
            queries = paired_by_halves(queries, s.plain + s.turned, s.plain, s.turned)
            keys = paired_by_halves(keys, s.latent + s.turned, s.latent, s.turned)
        norm = RMSNorm.load(weights, f"{name}.kv_a_layernorm", s.latent, eps)
        into, out = _load_heads(weights, name, s)
        output = Linear.load(weights, f"{name}.o_proj", hidden, s.heads * s.value, bias=bias)
        return cls(layer, s, narrow, queries, keys, norm, into, out, output, scale, rope.gain**2 if rope else 1.0, temperature)

    def __call__(
        self, x: mx.array, step: Step, rotation: Rotation | None, *, norm: RMSNorm | None = None, onto: mx.array | None = None
    ) -> mx.array:
        """`[T, hidden]` to the same shape. `norm` is applied to x first; the result is added to `onto`, if given."""
        x = x if norm is None else norm(x)
        s, rows = self.sizes, x.shape[0]
        row = x if self.narrow is None else self.narrow[1](self.narrow[0](x))
        q, q_turned = mx.split(self.queries(row).reshape(rows, s.heads, -1), [s.plain], axis=-1)
        latent, k_turned = mx.split(self.keys(x), [s.latent], axis=-1)
        latent = self.norm(latent)[:, None]
        k_turned = k_turned[:, None]
        if rotation is not None:
            q_turned, k_turned = rotation(q_turned), rotation(k_turned)
        q_turned = q_turned if self.gain == 1.0 else (q_turned * self.gain).astype(q_turned.dtype)
        q = mx.concatenate([_by_head(self.into, q), q_turned], axis=-1)
        if self.temperature is not None and self.temperature.beyond(step.segments):
            q = (q * self.temperature.at(step)).astype(q.dtype)
        k = mx.concatenate([latent, k_turned], axis=-1)
        y = step.attend(self.layer, q, k, latent, AttentionParams(self.scale))
        return self.output(_by_head(self.out, y).reshape(rows, -1), onto=onto)


def _by_head(matrices: ExpertLinear, x: mx.array) -> mx.array:
    """Multiply each head by its matrix: `[T, heads, in]` to `[T, heads, out]`. A head's rows become neighbours, so its matrix is read
    once."""
    rows, heads, size = x.shape
    if matrices.bias is None and is_gpu() and isinstance(matrices.matrix, (Dense, Quantized)):
        # MLX's Metal products would copy one row whose stride is that of a whole transposed row.
        y = _batched(x.reshape(heads, 1, size) if rows == 1 else x.swapaxes(0, 1), matrices.matrix)
        return y.reshape(1, heads, -1) if rows == 1 else y.swapaxes(0, 1)
    own = mx.repeat(mx.arange(heads, dtype=mx.uint32), rows)
    y = matrices(x.swapaxes(0, 1).reshape(heads * rows, 1, size), own, True)
    return y.reshape(heads, rows, -1).swapaxes(0, 1)


def _batched(x: mx.array, matrix: Dense | Quantized) -> mx.array:
    """Multiply `[heads, T, in]` by `[heads, out, in]`, transposed: one launch, without the indices of a gathered product."""
    return x @ matrix.weight.swapaxes(-1, -2) if isinstance(matrix, Dense) else quantized_product(x, matrix)


def _load_heads(weights: Weights, name: str, s: LatentSizes) -> tuple[ExpertLinear, ExpertLinear]:
    """Load the parts of `kv_b_proj` under mlx-lm's names: keys, transposed for products with queries, and values.

    They are copies, not views, because MLX's CUDA product of gathered matrices assumes that matrices are contiguous.
    """
    both = s.plain + s.value
    shape = (s.heads * both, s.latent)

    def keys(sources: list[Matrix]) -> Matrix:
        rows = numbers(sources[0]) if not isinstance(sources[0], Dense) else sources[0].weight
        return Dense(mx.contiguous(rows.reshape(s.heads, both, s.latent)[:, : s.plain].swapaxes(1, 2)))

    def values(sources: list[Matrix]) -> Matrix:
        return map_rows(sources[0], lambda rows: mx.contiguous(rows.reshape(s.heads, both, -1)[:, s.plain :]))

    stored = f"{name}.kv_b_proj.weight"
    into, out = (s.heads, s.latent, s.plain), (s.heads, s.value, s.latent)
    return (
        ExpertLinear.load_experts(weights, f"{name}.embed_q", into, otherwise=[Recipe((stored,), (shape,), keys)]),
        ExpertLinear.load_experts(weights, f"{name}.unembed_out", out, otherwise=[Recipe((stored,), (shape,), values)]),
    )
