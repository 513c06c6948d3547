"""Kernels, translated to CUDA and compiled for an H100 that need not be there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from . import nvrtc

needs_nvrtc = pytest.mark.skipif(bool(nvrtc.wheels_missing()), reason=f"no compiler for CUDA: {nvrtc.wheels_missing()}")

GPU, PTX = "sm_90", "compute_90"
"""For a GPU, or, in a quarter of the time, only as far as NVIDIA's own assembly language."""
QUICK = ("--Ofast-compile=max",)
"""Without optimizing: a quarter of the time, and refuses the same. Only with optimizing is an array in registers."""
UNOPTIMIZED = ("--ptxas-options=-O0", *QUICK)
"""The assembler takes half the time too."""


class Compiled(list[str]):
    """The PTX of every kernel that is launched inside `run_with(compiled.maker)`; answers are zeros."""

    def __init__(self, architecture: str = GPU, *options: str) -> None:
        super().__init__()
        self.architecture = architecture
        self.options = options or (UNOPTIMIZED if architecture == GPU else ())

    def maker(self, *, name: str, input_names: list[str], output_names: list[str], source: str, header: str = "") -> Callable[..., Any]:
        def call(*, inputs, output_shapes, output_dtypes, template=(), **rest):  # type: ignore[no-untyped-def]
            arrays = list(zip(input_names, inputs, strict=True))
            outputs = list(zip(output_names, output_dtypes, strict=True))
            code = nvrtc.cuda_source(name, arrays, outputs, source, header, template)
            ptx, cubin = nvrtc.compile_cuda(code, self.architecture, *self.options)
            assert cubin.startswith(b"\x7fELF") == (self.architecture == GPU)
            self.append(ptx)
            return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]

        return call
