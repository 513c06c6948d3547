"""Kernels as the C++ templates that MLX makes of them, compiled as far as their meaning goes: names are looked up where a template is
defined, among what MLX declares before it. The emulator compiles kernels with their template arguments filled in."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxinfer.kernels_metal import emulator
from mlxinfer.kernels_metal.emulator.build import toolchain
from mlxinfer.kernels_metal.emulator.toolchain import LANGUAGE, PRELUDE

HEADERS = Path(mx.__file__).parent / "include" / "mlx" / "backend" / "metal" / "kernels"
"""MLX's own Metal headers, which its wheels bring for every system."""
_STDLIB = ("types", "vectors", "math", "integer", "simd", "matrix", "atomic")
_COMMENTS = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_STRUCTS = re.compile(r"^(?:template <[^{};]*?>\s*)?struct \w+(?=\s*\{)", re.MULTILINE)
_FUNCTIONS = re.compile(r"^(?:template <[^{};]*?>\s*)?(?:inline|METAL_FUNC)\s[^{};#]*?\)\s*(?=\{)", re.MULTILINE)
_ARRAYS = re.compile(r"^(\s*threadgroup [\w:<>, ]+?)\b(\w+)\[[^\]]*\]((?:\[[^\]]*\])*);", re.MULTILINE)
_ATTRIBUTES = re.compile(r"\s*\[\[[a-z_]+(\([^)]*\))?\]\]")


@cache
def declarations() -> tuple[str, ...]:
    """Return the structs and function declarations that MLX's headers put before every kernel."""
    text = _COMMENTS.sub("", (HEADERS / "utils.h").read_text(encoding="utf-8"))
    return tuple(" ".join(match[0].split()) + ";" for pattern in (_STRUCTS, _FUNCTIONS) for match in pattern.finditer(text))


@cache
def prelude() -> str:
    """Metal's library as the emulator has it, then MLX's declarations."""
    lines = [f'#include "{PRELUDE / name}.h"' for name in _STDLIB]
    lines += ["using namespace metal;", f'#include "{PRELUDE / "constructors.h"}"']
    lines += ["#define METAL_FUNC inline", "template <typename T> struct complex_t;", "typedef complex_t<float> complex64_t;"]
    return "\n".join([*lines, *declarations(), ""])


class Templates(dict[str, str]):
    """MLX's source of every kernel that is launched inside `run_with(templates.maker)`, by its name with its template arguments and the
    dtypes of its inputs; answers are zeros."""

    def maker(self, **made: Any) -> Callable[..., list[mx.array]]:
        kernel = emulator.metal_kernel(**made)

        def call(*, inputs: Any, output_shapes: Any, output_dtypes: Any, template: Any = (), **launch: Any) -> list[mx.array]:
            kinds = "".join(f" {x.dtype}{'*' * (x.size >= 8)}".replace("mlx.core.", "") for x in inputs)
            name = f"{made['name']} {dict(template)} {output_dtypes}{kinds}"
            if name not in self:
                self[name] = emulator.mlx_source(kernel, inputs, output_dtypes=output_dtypes, template=template)
            return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]

        return call


def errors(source: str) -> str:
    """Return a compiler's errors in MLX's source, or ""."""
    body = _ATTRIBUTES.sub("", source.split("```")[1] if "```" in source else source)
    # In C++ for OpenCL only kernels have arrays of a threadgroup, and templates are no kernels: here they are pointers to such arrays.
    code = prelude() + _ARRAYS.sub(r"\1(*\2)\3 = 0;", body)
    command = [toolchain("fast").compiler, *LANGUAGE, "-fsyntax-only", "-"]
    return subprocess.run(command, input=code, capture_output=True, text=True, check=False).stderr
