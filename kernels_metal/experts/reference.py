"""Experts in plain MLX: gathered products, the unit between them, and the weighted sum."""

from __future__ import annotations

import mlx.core as mx

from ..quantized_matmul import reference
from .launcher import Matrices, Unit


def experts_in(x: mx.array, chosen: mx.array, matrices: Matrices, unit: Unit) -> mx.array:
    """See the launcher."""
    y = gathered(x[:, None, None], chosen, matrices).squeeze(-2)
    if unit.sides == 1:
        return activated(y, unit)
    gate, up = mx.split(y, 2, axis=-1)
    return gated(gate, up, unit)


def experts_out(x: mx.array, chosen: mx.array, shares: mx.array, matrices: Matrices, added: mx.array | None = None) -> mx.array:
    """See the launcher."""
    y = gathered(x[..., None, :], chosen, matrices).squeeze(-2)
    y = (y * shares.astype(x.dtype)[..., None]).sum(axis=-2)
    return y if added is None else y + added


def activated(x: mx.array, unit: Unit) -> mx.array:
    """Return the unit of numbers without gates."""
    return mx.square(mx.maximum(x, 0)) if unit.name == "relu_squared" else x


def gated(gate: mx.array, up: mx.array, unit: Unit) -> mx.array:
    """Return the unit of gates and ups."""
    if unit.name != "clamped_swiglu":
        return reference.gated(gate, up, unit.name)
    gate = mx.minimum(gate, unit.limit)
    return gate * mx.sigmoid(unit.alpha * gate) * (mx.clip(up, -unit.limit, unit.limit) + 1)


def gathered(x: mx.array, chosen: mx.array, matrices: Matrices) -> mx.array:
    """Multiply x `[..., 1, K]` by the matrices of `chosen` `[...]`, transposed: `[..., 1, N]`."""
    f, (weight, *scales) = matrices.form, matrices.arrays
    if f.mode == "plain":
        y = mx.gather_mm(x, weight.swapaxes(-1, -2), rhs_indices=chosen)
    else:
        biases = scales[1] if f.mode == "affine" else None
        y = mx.gather_qmm(x, weight, scales[0], biases, None, chosen, True, f.group_size, f.bits, f.mode)
    return y if matrices.bias is None else y + matrices.bias[chosen][..., None, :]
