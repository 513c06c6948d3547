"""Compares a kernel's signature with the Metal source that MLX generates. Works without a GPU."""

from __future__ import annotations

import ctypes
import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx

from .kernel import Kernel
from .signature import Template

_PARAMETERS = re.compile(r"\[\[kernel\]\] void \w+\(\s*(?P<parameters>.*?)\)\s*\{", re.DOTALL)


def mlx_source(kernel: Kernel, inputs: Sequence[mx.array], *, output_dtypes: Sequence[mx.Dtype], template: Template | None = None) -> str:
    """The source that MLX would pass to Apple's compiler. During tracing, the process's standard output is captured."""
    body = kernel.body
    real = mx.fast.metal_kernel(
        name=body.name,
        input_names=list(body.inputs),
        output_names=list(body.outputs),
        source=body.source,
        header=body.header,
        ensure_row_contiguous=kernel.row_contiguous,
        atomic_outputs=body.atomic_outputs,
    )

    def launch(*arrays: mx.array) -> list[mx.array]:
        found: list[mx.array] = real(  # type: ignore[operator]
            inputs=list(arrays),
            output_shapes=[(1,)] * len(body.outputs),
            output_dtypes=list(output_dtypes),
            template=list(template or ()),
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
            stream=mx.gpu,
            verbose=True,
        )
        return found

    with tempfile.TemporaryDirectory() as folder:
        return _printed_by(lambda: mx.export_function(str(Path(folder) / "kernel.mlxfn"), launch, *inputs))


def compare_signature(
    kernel: Kernel, inputs: Sequence[mx.array], *, output_dtypes: Sequence[mx.Dtype], template: Template | None = None
) -> list[str]:
    """Differences between the parameters that MLX and the emulator declare; empty if they are equal."""
    theirs = parameters(mlx_source(kernel, inputs, output_dtypes=output_dtypes, template=template))
    ours = [str(parameter) for parameter in kernel.body.parameters(inputs, output_dtypes)]
    longest = max(len(theirs), len(ours))
    pairs = zip(theirs + ["nothing"] * (longest - len(theirs)), ours + ["nothing"] * (longest - len(ours)), strict=True)
    return [f"parameter {i}: MLX has {their}, the emulator {our}" for i, (their, our) in enumerate(pairs) if their != our]


def parameters(source: str) -> list[str]:
    """Parameters of the kernel in MLX's source, one string each. Raises ValueError if the source has no kernel."""
    match = _PARAMETERS.search(source)
    if not match:
        raise ValueError(f"MLX has printed no kernel: {source[:200]!r}")
    return [re.sub(r"\s+", " ", text.strip()) for text in match["parameters"].split(",\n")]


def _printed_by(action: Callable[[], object]) -> str:
    """Text that `action` prints. MLX prints from C++, bypassing sys.stdout."""
    sys.stdout.flush()
    with tempfile.TemporaryFile() as file:
        kept = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            action()
        finally:
            ctypes.CDLL(None).fflush(None)
            os.dup2(kept, 1)
            os.close(kept)
        file.seek(0)
        return file.read().decode("utf-8", errors="replace")
