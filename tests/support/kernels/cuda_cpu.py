"""Translated kernels, run on the CPU: the same CUDA source, with a stand-in for CUDA (`cuda_on_cpu/`)."""

from __future__ import annotations

import ctypes
import hashlib
import platform
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlxinfer.kernels_metal.emulator import toolchain

from .nvrtc import TYPES, cuda_source

HERE = Path(__file__).parent / "cuda_on_cpu"
FLAGS = ["-std=c++17", "-O0", "-fPIC", "-shared", "-ffp-contract=off", "-w", f"-I{HERE}", "-rtlib=compiler-rt"]
FLAGS += ["-mf16c"] if platform.machine() == "x86_64" else []
CACHE = Path(tempfile.gettempdir()) / "mlxinfer-cuda-on-cpu"


def maker(*, name: str, input_names: list[str], output_names: list[str], source: str, header: str = "") -> Callable[..., Any]:
    """For `run_with`."""

    def call(
        *,
        inputs: Sequence[mx.array],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Any = (),
    ) -> list[mx.array]:
        named = list(zip(input_names, inputs, strict=True))
        outputs = list(zip(output_names, output_dtypes, strict=True))
        code = cuda_source(name, named, outputs, source, header, template)
        memory = [_memory(a) for a in inputs]
        answers = [
            np.full(shape, 255, np.uint8 if d.size == 1 else f"u{d.size}") for shape, d in zip(output_shapes, output_dtypes, strict=True)
        ]
        pointers, parameters = [], []
        for (n, a), content in zip(named, memory, strict=True):
            pointers.append(content)
            parameters.append(f"(const {TYPES[a.dtype]}*)a[{len(pointers) - 1}]")
            if a.ndim and f"{n}_shape" in code:
                pointers.append(np.array([*a.shape, *[0] * (8 - a.ndim)], np.int32))
                parameters.append(f"*(const mlx::core::cu::Shape*)a[{len(pointers) - 1}]")
        for (_, dtype), content in zip(outputs, answers, strict=True):
            pointers.append(content)
            parameters.append(f"({TYPES[dtype]}*)a[{len(pointers) - 1}]")
        entry = f'extern "C" void entry(void** a) {{ mlx::core::cu::custom_kernel_{name}({", ".join(parameters)}); }}\n'
        _launch(_library(code + entry), pointers, [g // t for g, t in zip(grid, threadgroup, strict=True)], threadgroup)
        return [mx.array(content).view(dtype) for content, (_, dtype) in zip(answers, outputs, strict=True)]

    return call


def _memory(array: mx.array) -> np.ndarray:
    return np.ascontiguousarray(np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array))


def _library(code: str) -> ctypes.CDLL:
    """Compiled once for each source."""
    runtime = HERE / "blocks.cpp"
    parts = [code, *FLAGS, *(p.read_text(encoding="utf-8") for p in sorted(HERE.iterdir()))]
    path = CACHE / f"{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:24]}.so"
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            (file := Path(folder) / "kernel.cpp").write_text(code, encoding="utf-8")
            built = Path(folder) / "kernel.so"
            done = subprocess.run(
                [_compiler(), *FLAGS, str(file), str(runtime), "-lm", "-o", str(built)], capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise RuntimeError(done.stderr)
            built.rename(path)
    return ctypes.CDLL(str(path))


def _compiler() -> str:
    found = toolchain.find()
    assert isinstance(found, toolchain.Toolchain), found
    return found.compiler


def _launch(library: ctypes.CDLL, pointers: list[np.ndarray], grid: Sequence[int], block: Sequence[int]) -> None:
    library.cuda_launch.restype = ctypes.c_char_p
    arguments = (ctypes.c_void_p * len(pointers))(*(p.ctypes.data for p in pointers))
    problem = library.cuda_launch(library.entry, arguments, (ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(*block))
    if problem:
        raise RuntimeError(problem.decode())
