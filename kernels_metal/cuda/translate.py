"""Translates Metal source to CUDA source word by word; nothing is rearranged.

`mx.fast.cuda_kernel` takes the body of a kernel and a header, as `mx.fast.metal_kernel` does. The differences are words: address spaces,
`inline`, literals, the names of thread indices. Macros could not replace them, because CUDA's own headers use `device` and `thread` as
words. `metal_stdlib.cuh` defines what the words mean in CUDA.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

TOKENS = re.compile(
    r"""(?P<comment>//[^\n]*|/\*.*?\*/)
      | (?P<directive>^[ \t]*\#[^\n]*)
      | (?P<string>"(?:\\.|[^"\\])*")
      | (?P<number>(?:0[xX][0-9a-fA-F]+|(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?)[a-zA-Z]*)
      | (?P<word>[A-Za-z_]\w*)
      | (?P<space>\s+)
      | (?P<mark>->|::|.)""",
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)

_UINT3 = "metal::uint3({0}.x, {0}.y, {0}.z)"
_GRID = ", ".join(f"blockIdx.{i} * blockDim.{i} + threadIdx.{i}" for i in "xyz")
_LINEAR = "metal::linear_thread_index()"
THREAD_NAMES = {
    "thread_position_in_grid": ("metal::uint3", f"metal::uint3({_GRID})"),
    "thread_position_in_threadgroup": ("metal::uint3", _UINT3.format("threadIdx")),
    "threadgroup_position_in_grid": ("metal::uint3", _UINT3.format("blockIdx")),
    "threadgroups_per_grid": ("metal::uint3", _UINT3.format("gridDim")),
    "threads_per_threadgroup": ("metal::uint3", _UINT3.format("blockDim")),
    "threads_per_grid": ("metal::uint3", "metal::uint3(" + ", ".join(f"gridDim.{i} * blockDim.{i}" for i in "xyz") + ")"),
    "thread_index_in_threadgroup": ("metal::uint", _LINEAR),
    "thread_index_in_simdgroup": ("metal::uint", f"({_LINEAR} & 31u)"),
    "simdgroup_index_in_threadgroup": ("metal::uint", f"({_LINEAR} >> 5)"),
    "simdgroups_per_threadgroup": ("metal::uint", "((blockDim.x * blockDim.y * blockDim.z + 31u) >> 5)"),
    "threads_per_simdgroup": ("metal::uint", "32u"),
}
"""Arguments that Metal passes to a kernel in addition to its buffers."""

_SCALARS = ("char", "uchar", "short", "ushort", "int", "uint", "long", "ulong", "float", "half")
_FUNCTIONS = """
abs as_type ceil clamp clz cos dot exp exp2 fabs floor fma isfinite isinf isnan log log2 max min popcount pow rint round rsqrt select sin
sqrt tanh trunc
"""
SHARED_WITH_CUDA = frozenset(
    [*_FUNCTIONS.split(), "half", "uint", "ulong", "ushort", "vec", *(f"{t}{n}" for t in _SCALARS for n in (2, 3, 4))]
)
"""Names that CUDA or MLX also has. In a body, only a declaration within it identifies the meaning."""

QUALIFIERS = frozenset({"device", "constant", "thread"})
INLINE = frozenset({"inline", "METAL_FUNC"})


def translate(source: str, header: str, scalars: Iterable[str] = ()) -> tuple[str, str]:
    """Translate body and header of a Metal kernel to `(body, header)` for `mx.fast.cuda_kernel`.

    `scalars` are the inputs without dimensions, which Metal passes by reference and CUDA by pointer. Every function in the header must be
    `inline`, because CUDA expects `__device__` there.
    """
    body = _words(source, frozenset(scalars))
    used = {m.group() for m in re.finditer(r"[A-Za-z_]\w*", body)}
    lines = ["using namespace metal;"]
    lines += [f"using metal::{name};" for name in sorted(SHARED_WITH_CUDA & used)]
    lines += [f"const {kind} {name} = {value};" for name, (kind, value) in THREAD_NAMES.items() if name in used]
    return "\n".join([*lines, body]), f"{_stdlib()}\nnamespace metal {{\n{_words(header, frozenset())}\n}}\n"


@cache
def _stdlib() -> str:
    return (Path(__file__).parent / "metal_stdlib.cuh").read_text(encoding="utf-8")


def _words(source: str, scalars: frozenset[str]) -> str:
    tokens = [(str(m.lastgroup), m.group()) for m in TOKENS.finditer(source)]
    return "".join(_word(kind, text, tokens, i, scalars) for i, (kind, text) in enumerate(tokens))


def _word(kind: str, text: str, tokens: list[tuple[str, str]], index: int, scalars: frozenset[str]) -> str:
    if kind == "number":
        return _number(text)
    if kind == "directive":
        return _directive(text)
    if kind == "comment" and text.startswith("/*"):
        return text
    if kind != "word":
        return text
    if text in QUALIFIERS:
        return ""
    if text == "threadgroup":
        return "" if _is_pointer(tokens, index) else "__shared__"
    if text in INLINE:
        return "__device__ inline"
    if text == "constexpr" and _previous(tokens, index) not in INLINE and _is_function(tokens, index):
        return "__device__ constexpr"
    if text in scalars and _previous(tokens, index) not in {".", "->", "::"}:
        return f"(*{text})"
    return text


def _number(text: str) -> str:
    """In Metal, a fraction without a suffix is a float; `1.5h` is a half."""
    if text[:2].lower() == "0x" or not re.search(r"[.eE]", text):
        return text
    if text[-1] in "hH":
        return f"half({text[:-1]}f)"
    return text if text[-1] in "fF" else f"{text}f"


def _directive(text: str) -> str:
    if re.match(r"\s*#\s*(include|pragma\s+once)\b", text):
        return ""
    if macro := re.match(r"\s*#\s*define\s", text):
        return macro.group() + _words(text[macro.end() :], frozenset())
    return re.sub(r"#pragma\s+clang\s+loop\s+unroll\s*\(\s*(full|enable)\s*\)", "#pragma unroll", text)


def _is_pointer(tokens: list[tuple[str, str]], index: int) -> bool:
    """True if the declaration after `threadgroup` is a pointer or reference, not memory."""
    depth = 0
    for _, text in tokens[index + 1 :]:
        depth += (text == "<") - (text == ">")
        if depth == 0 and text in {"*", "&"}:
            return True
        if depth == 0 and text in {";", ",", ")", "=", "[", "("}:
            return False
    return False


def _is_function(tokens: list[tuple[str, str]], index: int) -> bool:
    return next((text for _, text in tokens[index + 1 :] if text in {"(", "=", ";", "{"}), "") == "("


def _previous(tokens: list[tuple[str, str]], index: int) -> str:
    return next((text for kind, text in reversed(tokens[:index]) if kind not in {"space", "comment"}), "")
