"""Metal source files: their layout, and how to extract the arguments of `mx.fast.metal_kernel` from them.

A `.metal` file holds complete functions, followed by one or more kernels. A kernel begins with a comment that is parsed here,

    //: kernel name(input, input, ...) -> output, ...

and ends at the next such comment or the end of the file: that is the body, in which inputs, outputs, template arguments and
Metal's attributes (`thread_index_in_simdgroup`) are names. Further `//:` lines continue the comment and describe the threads that
the kernel needs. `#include "include/..."` inserts a file of `kernels_metal/`, once. Comments and indentation are left out, because MLX
hashes the source at every launch; line breaks stay, so that messages have the right lines.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from ..util.dataclass import dataclass

ROOT = Path(__file__).parent
_NOISE = re.compile(r"^[ \t]+|[ \t]*//.*$|[ \t]+$", re.MULTILINE)
_INCLUDE = re.compile(r'^#include "(.+)"\n', re.MULTILINE)
_KERNEL = re.compile(r"^//: kernel (?P<name>\w+)\((?P<inputs>[\w\s,/:]*)\) -> (?P<outputs>\w+(?:, \w+)*)\n(?://:.*\n)*", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class KernelSource:
    """Arguments of `mx.fast.metal_kernel` for one kernel."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    header: str
    """Functions before the kernels, with includes inserted, without comments and indentation."""
    body: str
    """Body of the kernel function, likewise."""


@cache
def load(file: str, kernel: str) -> KernelSource:
    """Load a kernel from a file, named relative to `kernels_metal/`. Raises ValueError if the file has no such kernel."""
    text = (ROOT / file).read_text(encoding="utf-8")
    found = list(_KERNEL.finditer(text))
    for i, match in enumerate(found):
        if match["name"] == kernel:
            end = found[i + 1].start() if i + 1 < len(found) else len(text)
            header = _with_includes(text[: found[0].start()], set())
            body = text[match.end() : end]
            return KernelSource(
                kernel, _listed_names(match["inputs"]), _listed_names(match["outputs"]), _without_comments(header), _without_comments(body)
            )
    raise ValueError(f"{file} has no kernel {kernel}, only {', '.join(m['name'] for m in found) or 'none'}")


def all_kernels() -> dict[str, str]:
    """Return the file of each kernel of this folder, relative to it."""
    files = [path for path in sorted(ROOT.rglob("*.metal")) if "emulator" not in path.parts[len(ROOT.parts) :]]
    return {match["name"]: str(path.relative_to(ROOT)) for path in files for match in _KERNEL.finditer(path.read_text(encoding="utf-8"))}


def _without_comments(code: str) -> str:
    return _NOISE.sub("", code)


def _listed_names(listed: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\w+", listed))


def _with_includes(text: str, seen: set[str]) -> str:
    def insert(match: re.Match[str]) -> str:
        if match[1] in seen:
            return ""
        seen.add(match[1])
        return _with_includes((ROOT / match[1]).read_text(encoding="utf-8").replace("#pragma once\n", ""), seen)

    return _INCLUDE.sub(insert, text)
