"""A maker of kernels that compute nothing: they note for what they would be compiled, and with how many threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

Variant = tuple[Any, ...]
"""Kernel, template, and all else that MLX compiles a variant of its own for: dtypes, and which inputs have fewer than 8 elements."""


class Recorder:
    """For `executors.run_with`."""

    def __init__(self) -> None:
        self.variants: set[Variant] = set()
        self.most_threads = 0

    def __call__(self, *, name: str, **_: Any) -> Callable[..., list[mx.array]]:
        def call(
            *,
            inputs: Sequence[mx.array],
            output_shapes: Sequence[Sequence[int]],
            output_dtypes: Sequence[mx.Dtype],
            threadgroup: tuple[int, int, int],
            template: Sequence[tuple[str, Any]] = (),
            **_: Any,
        ) -> list[mx.array]:
            kinds = tuple((array.dtype, array.size < 8) for array in inputs)
            self.variants.add((name, tuple(template), kinds, tuple(output_dtypes)))
            self.most_threads = max(self.most_threads, threadgroup[0] * threadgroup[1] * threadgroup[2])
            return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]

        return call

    @property
    def templates(self) -> set[Variant]:
        """Kernel and template of each variant."""
        return {variant[:2] for variant in self.variants}
