"""Metal source files: their layout, and how to extract the arguments of `mx.fast.metal_kernel` from them.

A `.metal` file holds complete functions, followed by one or more kernels. A kernel begins with a comment that is parsed here,

    //: kernel name(input, input, ...) -> output, ...

and ends at the next such comment or the end of the file: that is the body, in which inputs, outputs, template arguments and
Metal's attributes (`thread_index_in_simdgroup`) are names. Further `//:` lines continue the comment and describe the threads that
the kernel needs. `#include "include/..."` inserts a file of `kernels_metal/`, once.

MLX hashes the whole source at every launch, so `load` returns short sources: without comments, spaces, and functions and structs that the
kernel does not use, and with short names. `readable` gives messages of compilers the real names again. Line breaks of bodies stay.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

from ..util.dataclass import dataclass

ROOT = Path(__file__).parent
_NOISE = re.compile(r"^[ \t]+|[ \t]*//.*$|[ \t]+$", re.MULTILINE)
_WORD = re.compile(r'"[^"\n]*"|(\.|->|::|)\b([A-Za-z_]\w*)')
_SPACE = re.compile(r"(?<=\w) +(?=[^\w\s\"])|(?<=[^\w\s\"]) +(?=\w)|(?<=[,;(){}\[\]=?:]) +| +(?=[,;(){}\[\]])")
"""Spaces next to a word, and next to a mark that no other mark changes."""
_NAME = re.compile(r"\b(?:struct|union|enum) (\w+)|(\w+)(?: = |[(\[])")
"""The name in a declaration of a type, a function, a constant or a table."""
_MACRO = re.compile(r"^#define (\w+)", re.MULTILINE)
_TEMPLATE = re.compile(r"^template <.*>\n", re.MULTILINE)
_SHORT_NAME = re.compile(r"\b[A-Za-z]{1,2}_\b")
_METAL = """
__CUDACC__ __METAL_VERSION__ _Pragma METAL_FUNC INFINITY alignas alignof auto bool break case char class const constant constexpr continue
decltype default define defined device do double elif else endif enum explicit extern false float from_chars goto half ifdef ifndef
include inline long namespace operator pragma private public return short signed sizeof static static_assert static_cast struct switch
template this thread threadgroup true typedef typename uchar uint ulong union unsigned ushort using void while int8_t int16_t int32_t
int64_t uint8_t uint16_t uint32_t uint64_t ptrdiff_t size_t clang loop unroll full disable bfloat bfloat16_t float16_t packed_half4
packed_float4 atomic_float atomic_int atomic_uint atomic_fetch_add_explicit atomic_fetch_max_explicit atomic_load_explicit
atomic_store_explicit memory_order_relaxed as_type ceil clamp copysign exp2 fabs fast floor fmax fmin fmod fract isfinite isinf isnan
ldexp log2 mulhi popcount pow precise rint round rsqrt select sqrt tanh trunc metal numeric_limits infinity mem_device mem_flags mem_none
mem_threadgroup simdgroup_barrier threadgroup_barrier simd_all simd_any simd_ballot simd_broadcast simd_is_first simd_max simd_min
simd_prefix_exclusive_sum simd_prefix_inclusive_sum simd_product simd_shuffle simd_shuffle_down simd_shuffle_up simd_shuffle_xor simd_sum
simd_vote quad_max quad_min quad_shuffle quad_shuffle_down quad_shuffle_xor quad_sum make_filled_simdgroup_matrix simdgroup_bfloat8x8
simdgroup_float8x8 simdgroup_half8x8 simdgroup_load simdgroup_matrix simdgroup_multiply simdgroup_multiply_accumulate simdgroup_store
thread_elements dispatch_quadgroups_per_threadgroup dispatch_simdgroups_per_threadgroup dispatch_threads_per_threadgroup grid_origin
grid_size quadgroup_index_in_threadgroup quadgroups_per_threadgroup simdgroup_index_in_threadgroup simdgroups_per_threadgroup
thread_execution_width thread_index_in_quadgroup thread_index_in_simdgroup thread_index_in_threadgroup thread_position_in_grid
thread_position_in_threadgroup threadgroup_position_in_grid threadgroups_per_grid threads_per_grid threads_per_simdgroup
threads_per_threadgroup
"""
_WORDS = frozenset(_METAL.split())
"""Names of C++, Metal and MLX. All others of at least 4 letters are ours. A missing one fails to compile."""
_VECTOR = re.compile(r"(?:bool|u?char|u?short|u?int|u?long|half|bfloat|float)[2348]")
_INCLUDE = re.compile(r'^#include "(.+)"\n', re.MULTILINE)
_KERNEL = re.compile(r"^//: kernel (?P<name>\w+)\((?P<inputs>[\w\s,/:]*)\) -> (?P<outputs>\w+(?:, \w+)*)\n(?://:.*\n)*", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class KernelSource:
    """Arguments of `mx.fast.metal_kernel` for one kernel."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    header: str
    """Functions before the kernels that the kernel uses, with includes inserted, shortened."""
    body: str
    """Body of the kernel function, shortened."""


@cache
def load(file: str, kernel: str) -> KernelSource:
    """Load a kernel from a file, named relative to `kernels_metal/`. Raises ValueError if the file has no such kernel."""
    text = (ROOT / file).read_text(encoding="utf-8")
    found = list(_KERNEL.finditer(text))
    for i, match in enumerate(found):
        if match["name"] == kernel:
            end = found[i + 1].start() if i + 1 < len(found) else len(text)
            header = _without_comments(_with_includes(text[: found[0].start()], set()))
            body = _without_comments(text[match.end() : end])
            inputs, outputs = _listed_names(match["inputs"]), _listed_names(match["outputs"])
            shapes = (f"{name}{suffix}" for name in inputs for suffix in ("", "_shape", "_strides", "_ndim"))
            kept = {*shapes, *outputs, *(word for word in _words(body) if word.isupper())} - set(_MACRO.findall(header))
            return KernelSource(kernel, inputs, outputs, _short(_used(header, body)), _short(body, kept))
    raise ValueError(f"{file} has no kernel {kernel}, only {', '.join(m['name'] for m in found) or 'none'}")


def all_kernels() -> dict[str, str]:
    """Return the file of each kernel of this folder, relative to it."""
    files = [path for path in sorted(ROOT.rglob("*.metal")) if "emulator" not in path.parts[len(ROOT.parts) :]]
    return {match["name"]: str(path.relative_to(ROOT)) for path in files for match in _KERNEL.finditer(path.read_text(encoding="utf-8"))}


def readable(message: str) -> str:
    """Return a compiler's message about kernels with the names that their files have."""
    names = {short: name for name, short in _short_names().items()}
    return _SHORT_NAME.sub(lambda match: names.get(match[0], match[0]), message)


def _without_comments(code: str) -> str:
    return _NOISE.sub("", code)


def _words(code: str) -> set[str]:
    return {word for _, word in _WORD.findall(code)}


def _used(header: str, body: str) -> str:
    """Leave out functions, structs and constants of a header that neither the body nor anything that stays mentions, and overloads and
    specializations for structs of which that is so."""
    parts = list(_declarations(header))
    types = frozenset().union(*(part.names for part in parts if part.is_type))
    wanted, kept = _words(body), [False] * len(parts)
    found = True
    while found:
        found = False
        for i, part in enumerate(parts):
            if not kept[i] and (not part.names or part.names & wanted) and part.arguments & types <= wanted:
                kept[i] = found = True
                wanted |= _words(part.text)
    return "".join(part.text for part, stays in zip(parts, kept, strict=True) if stays)


@dataclass(frozen=True, slots=True)
class _Declaration:
    """A piece of a header."""

    text: str
    names: frozenset[str] = frozenset()
    """Names that it declares; none for directives, and where they are not simple."""
    arguments: frozenset[str] = frozenset()
    """Words in the parameters of a function, or in the arguments of a specialized struct."""
    is_type: bool = False


def _declarations(header: str) -> Iterator[_Declaration]:
    """Yield all that a header declares."""
    text, depth = "", 0
    for line in header.splitlines():
        text += f"{line}\n" if line else ""
        depth += line.count("{") - line.count("}")
        if line.startswith("#"):
            yield _Declaration(text)
            text = ""
        elif not depth and line.endswith(("}", ";")):
            head = _TEMPLATE.sub("", text).split("{")[0]
            named = list(_NAME.finditer(head))
            is_type, takes = bool(named and named[0][1]), bool(named) and (named[0][1] or named[0][0].endswith("("))
            arguments = _words(head[named[0].end() :]) if takes else set()
            yield _Declaration(text, frozenset(match[1] or match[2] for match in named), frozenset(arguments), is_type)
            text = ""
    yield _Declaration(text)


def _short(code: str, kept: Collection[str] = ()) -> str:
    """Return code with short names, and without needless spaces. `kept` are names that stay, except members of the same name."""
    names = _short_names()

    def renamed(match: re.Match[str]) -> str:
        mark, word = match[1], match[2]
        return match[0] if word not in names or (word in kept and not mark) else mark + names[word]

    return _SPACE.sub("", _WORD.sub(renamed, code))


@cache
def _short_names() -> dict[str, str]:
    """Return a shorter name for each of ours, the shortest for the most frequent. A letter or two and `_` are nobody else's name."""
    files = [path for path in ROOT.rglob("*") if path.suffix in (".metal", ".h") and "emulator" not in path.relative_to(ROOT).parts]
    words = Counter(word for path in files for _, word in _WORD.findall(_without_comments(path.read_text(encoding="utf-8"))))
    ours = [word for word in words if len(word) > 3 and word not in _WORDS and not _VECTOR.fullmatch(word)]
    letters = string.ascii_letters
    made = (short for short in (f"{x}{y}_" for x in ("", *letters) for y in letters) if short not in words)
    return dict(zip(sorted(ours, key=lambda word: (-words[word] * (len(word) - 2), word)), made, strict=False))


def _listed_names(listed: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\w+", listed))


def _with_includes(text: str, seen: set[str]) -> str:
    def insert(match: re.Match[str]) -> str:
        if match[1] in seen:
            return ""
        seen.add(match[1])
        return _with_includes((ROOT / match[1]).read_text(encoding="utf-8").replace("#pragma once\n", ""), seen)

    return _INCLUDE.sub(insert, text)
