"""`mx.fast.cuda_kernel` with the signature of `mx.fast.metal_kernel`, from the same source."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from .translate import translate

Size = tuple[int, int, int]


class CudaKernel:
    """Kernel with the arguments of `mx.fast.metal_kernel`, called like its result. Needs MLX's CUDA backend (`mlx[cuda]`)."""

    def __init__(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
        ensure_row_contiguous: bool = True,
    ) -> None:
        self.name = name
        self.input_names = list(input_names)
        self.output_names = list(output_names)
        self.source = source
        self.header = header
        self.ensure_row_contiguous = ensure_row_contiguous
        self._kernels: dict[str, Any] = {}

    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: Size,
        threadgroup: Size,
        template: Sequence[tuple[str, bool | int | mx.Dtype]] = (),
        init_value: float | None = None,
        verbose: bool = False,
        stream: Any = None,
    ) -> list[mx.array]:
        """Run the kernel. Raises ValueError unless the grid is a multiple of the threadgroup: CUDA would start threads that Metal does not
        start."""
        if any(g % t for g, t in zip(grid, threadgroup, strict=True)):
            raise ValueError(f"{self.name}: the grid {grid} is no multiple of the threadgroup {threadgroup}")
        arrays = [a if isinstance(a, mx.array) else mx.array(a) for a in inputs]
        outputs: list[mx.array] = self._kernel(arrays, output_dtypes)(
            inputs=arrays,
            output_shapes=output_shapes,
            output_dtypes=output_dtypes,
            grid=grid,
            threadgroup=threadgroup,
            template=list(template),
            init_value=init_value,
            verbose=verbose,
            stream=stream,
        )
        return outputs

    def _kernel(self, inputs: list[mx.array], output_dtypes: Sequence[mx.Dtype]) -> Any:
        """Some versions of MLX cache compiled kernels by name and template only, also on disk. The name therefore includes a hash of source
        and dtypes."""
        scalars = [name for name, a in zip(self.input_names, inputs, strict=True) if a.ndim == 0]
        dtypes = [a.dtype for a in inputs] + list(output_dtypes)
        key = f"{scalars} {dtypes}"
        if key not in self._kernels:
            body, header = translate(self.source, self.header, scalars)
            digest = hashlib.sha256(f"{key}\n{body}\n{header}".encode()).hexdigest()[:12]
            self._kernels[key] = mx.fast.cuda_kernel(
                name=f"{self.name}_{digest}",
                input_names=self.input_names,
                output_names=self.output_names,
                source=body,
                header=header,
                ensure_row_contiguous=self.ensure_row_contiguous,
            )
        return self._kernels[key]
