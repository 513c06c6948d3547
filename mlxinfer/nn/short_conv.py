"""A short causal convolution between two gates (LFM2, arXiv:2511.23404). Its state is its last inputs."""

from __future__ import annotations

import mlx.core as mx

from ..cache.base import RecurrentSpec, Rotation, Step
from ..util.dataclass import dataclass
from .linear import Linear
from .norms import RMSNorm


@dataclass(frozen=True, slots=True)
class ShortConv:
    """`output(c * conv(b * x))`, where b, c and x are projections of the input."""

    layer: int
    inputs: Linear
    """Projects `[T, hidden]` to b, c and x, `[T, 3 * hidden]`."""
    output: Linear
    """`[hidden, hidden]`."""
    convolution: mx.array
    """`[hidden, taps, 1]`."""
    bias: mx.array | None
    """Bias of the convolution, `[hidden]`."""

    @staticmethod
    def spec(hidden: int, taps: int) -> RecurrentSpec:
        """State: the convolution's last inputs, `[taps - 1, hidden]`."""
        return RecurrentSpec(((taps - 1, hidden),))

    def __call__(
        self, x: mx.array, step: Step, rotation: Rotation | None, *, norm: RMSNorm | None = None, onto: mx.array | None = None
    ) -> mx.array:
        """`[T, hidden]` to the same shape. `norm` is applied to x first; the result is added to `onto`, if given."""
        before, after, row = mx.split(self.inputs(x, norm=norm), 3, axis=-1)
        y = step.recur(self.layer, before * row, self.update)
        return self.output(after * y, onto=onto)

    def update(self, x: mx.array, states: tuple[mx.array, ...]) -> tuple[mx.array, tuple[mx.array, ...]]:
        """Advance B sequences by L tokens: x `[B, L, hidden]`, states as in `spec`. Returns `[B, L, hidden]` and the new states."""
        row = mx.concatenate([states[0].astype(x.dtype), x], axis=1)
        y = mx.conv1d(row, self.convolution, groups=x.shape[-1])
        y = y if self.bias is None else y + self.bias
        return y, (row[:, x.shape[1] :].astype(mx.float32),)
