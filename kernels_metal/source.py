"""Metal source files: how they are laid out, and how `mx.fast.metal_kernel` gets what it wants from them.

A `.metal` file holds whole functions, and at its end one or more kernels. A kernel begins with a comment that is read here,

    //: kernel name(input, input, ...) -> output, ...

and goes on to the next such comment, or the end of the file: that is the body, in which inputs, outputs, template arguments and
Metal's attributes (`thread_index_in_simdgroup`) are names. Further `//:` lines continue the comment; what follows the outputs says
what threads the kernel wants. `#include "include/..."` stands for a file in `kernels_metal/`, taken in once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent
_INCLUDE = re.compile(r'^#include "(.+)"\n', re.MULTILINE)
_KERNEL = re.compile(r"^//: kernel (?P<name>\w+)\((?P<inputs>[\w\s,/:]*)\) -> (?P<outputs>\w+(?:, \w+)*)\n(?://:.*\n)*", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Source:
    """What `mx.fast.metal_kernel` asks for: functions (`header`), and the inside of one kernel (`body`)."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    header: str
    body: str


@cache
def load(file: str, kernel: str) -> Source:
    """The kernel of a file, named relative to `kernels_metal/`."""
    text = (ROOT / file).read_text(encoding="utf-8")
    found = list(_KERNEL.finditer(text))
    for i, match in enumerate(found):
        if match["name"] == kernel:
            end = found[i + 1].start() if i + 1 < len(found) else len(text)
            header = _with_includes(text[: found[0].start()], set())
            return Source(kernel, _names(match["inputs"]), _names(match["outputs"]), header, text[match.end() : end])
    raise ValueError(f"{file} has no kernel {kernel}, only {', '.join(m['name'] for m in found) or 'none'}")


def _names(listed: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\w+", listed))


def _with_includes(text: str, seen: set[str]) -> str:
    def insert(match: re.Match[str]) -> str:
        if match[1] in seen:
            return ""
        seen.add(match[1])
        return _with_includes((ROOT / match[1]).read_text(encoding="utf-8").replace("#pragma once\n", ""), seen)

    return _INCLUDE.sub(insert, text)
