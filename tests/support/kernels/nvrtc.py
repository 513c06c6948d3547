"""NVIDIA's run-time compiler from its PyPI wheels: translated kernels compiled for a GPU that need not be there."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxinfer.kernels_metal.cuda import translate

TYPES = {
    mx.float32: "float",
    mx.float16: "__half",
    mx.bfloat16: "__nv_bfloat16",
    mx.uint32: "uint32_t",
    mx.int32: "int32_t",
    mx.uint8: "uint8_t",
    mx.bool_: "bool",
}

# What MLX puts before a kernel, without its own headers, which are in the wheels of mlx-cuda only (some 200 MB).
PREFIX = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define inf cuda::std::numeric_limits<float>::infinity()
typedef unsigned char uint8_t; typedef int int32_t; typedef unsigned int uint32_t; typedef long long int64_t;
namespace mlx::core::cu {
template <typename T> struct Extents { T values[8]; __device__ T operator[](int i) const { return values[i]; } };
using Shape = Extents<int32_t>; using Strides = Extents<int64_t>;
__device__ inline float exp(float x) { return ::expf(x); }
}
"""


class CompileError(RuntimeError):
    """With the compiler's log."""


NEEDED = {
    "nvidia-cuda-nvrtc": "libnvrtc.so*",
    "nvidia-cuda-runtime": "cuda_fp16.h",
    "nvidia-cuda-cccl": "nv/target",
    "nvidia-cuda-crt": "crt/host_defines.h",
}
"""Wheels, and a file of each."""


@cache
def wheels_missing() -> str:
    """Return the missing wheels, or ""."""
    missing = [wheel for wheel, file in NEEDED.items() if not any(found for root in _roots() for found in root.rglob(file))]
    return f"pip install {' '.join(missing)}" if missing else ""


@cache
def _roots() -> list[Path]:
    spec = importlib.util.find_spec("nvidia")
    return [Path(p) for p in spec.submodule_search_locations] if spec and spec.submodule_search_locations else []


@cache
def _library() -> Path | None:
    found = [p for root in _roots() for p in root.rglob("libnvrtc.so*") if "alt" not in p.name]
    return found[0] if found else None


@cache
def _includes() -> list[Path]:
    headers = {p.parent for root in _roots() for p in root.rglob("cuda_fp16.h")}
    return sorted(headers | {p / "cccl" for p in headers if (p / "cccl").is_dir()})


def cuda_source(
    name: str,
    inputs: Sequence[tuple[str, mx.array]],
    outputs: Sequence[tuple[str, mx.Dtype]],
    source: str,
    header: str,
    template: Sequence[tuple[str, Any]] = (),
) -> str:
    """The whole text that MLX hands to NVRTC for this call, as far as it depends on the kernel."""
    body, header = translate(source, header, [n for n, a in inputs if a.ndim == 0])
    parameters = []
    for n, a in inputs:
        parameters.append(f"const {TYPES[a.dtype]}* {n}")
        if a.ndim:
            infos = (("shape", "Shape"), ("strides", "Strides"), ("ndim", "int"))
            parameters += [f"const __grid_constant__ {t} {n}_{info}" for info, t in infos if f"{n}_{info}" in body]
    parameters += [f"{TYPES[d]}* {n}" for n, d in outputs]
    constants = "".join(f"  {_constant(n, v)}\n" for n, v in template)
    kernel = f'extern "C" __global__ void custom_kernel_{name}({", ".join(parameters)}) {{\n{constants}#line 1 "{name}.metal"\n{body}\n}}'
    return f"{PREFIX}\n{header}\nnamespace mlx::core::cu {{\n{kernel}\n}}\n"


def _constant(name: str, value: Any) -> str:
    if isinstance(value, mx.Dtype):
        return f"using {name} = {TYPES[value]};"
    return f"constexpr {'bool' if isinstance(value, bool) else 'int'} {name} = {str(value).lower()};"


@cache
def _nvrtc() -> ctypes.CDLL:
    library = _library()
    assert library is not None
    for builtins in library.parent.glob("libnvrtc-builtins.so*"):
        ctypes.CDLL(os.fspath(builtins), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(os.fspath(library))


def compile_cuda(code: str, architecture: str = "sm_90", *options: str) -> tuple[str, bytes]:
    """Source to `(PTX, cubin)`; raises CompileError."""
    nvrtc, program = _nvrtc(), ctypes.c_void_p()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), code.encode(), b"kernel.cu", 0, None, None) == 0
    flags = [f"--gpu-architecture={architecture}", *(f"--include-path={p}" for p in _includes()), *options]
    array = (ctypes.c_char_p * len(flags))(*(f.encode() for f in flags))
    try:
        if nvrtc.nvrtcCompileProgram(program, len(flags), array):
            raise CompileError(_get(program, "ProgramLog").decode(errors="replace"))
        return _get(program, "PTX").rstrip(b"\0").decode(), _get(program, "CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _get(program: ctypes.c_void_p, what: str) -> bytes:
    nvrtc, size = _nvrtc(), ctypes.c_size_t()
    assert getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)) == 0
    buffer = ctypes.create_string_buffer(size.value)
    assert getattr(nvrtc, f"nvrtcGet{what}")(program, buffer) == 0
    return buffer.raw
