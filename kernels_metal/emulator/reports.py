"""From what the runtime or a sanitizer says to a `KernelError` with a line of the user's source."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

from .build import toolchain
from .errors import KernelError
from .lint import is_users

# What a sanitizer calls it -> kind. The first that matches.
_SANITIZERS = (
    (r"ERROR: AddressSanitizer: (?P<what>[\w-]*(?:overflow|underflow|out of bounds|use-after)[\w-]*[^\n]*)", "bounds"),
    (r"ERROR: AddressSanitizer: (?P<what>(?:SEGV|BUS|stack-overflow)[^\n]*)", "crash"),
    (r"WARNING: ThreadSanitizer: (?P<what>data race)", "race"),
    (r"WARNING: MemorySanitizer: (?P<what>[\w-]+)", "uninitialised"),
    (r"runtime error: (?P<what>index [^\n]*out of bounds[^\n]*)", "bounds"),
    (r"runtime error: (?P<what>[^\n]*)", "undefined"),
    (r"(?P<what>ERROR: \w+Sanitizer: [^\n]*)", "crash"),
)
_FRAME = re.compile(r"^\s+#\d+ (?:0x[0-9a-f]+ in )?.*? (?P<file>[^\s:]+):(?P<line>\d+)(?::\d+)?(?: .*)?$", re.MULTILINE)
_DIRECT = re.compile(r"^(?P<file>[^\s:]+):(?P<line>\d+):\d+: runtime error", re.MULTILINE)
_ACCESS = re.compile(r"^\s*((?:Previous )?(?:[Aa]tomic )?(?:READ|WRITE|[Rr]ead|[Ww]rite) of size \d+)", re.MULTILINE)
_OBJECT = re.compile(r"(?:global variable|Location is global) '(?P<name>[^']+)'")


def explain_death(mode: str, report: str, code: int) -> KernelError:
    """The process has ended without an answer: a sanitizer has spoken, or a signal has ended it."""
    for pattern, kind in _SANITIZERS:
        match = re.search(pattern, report)
        if match:
            file, line = _first_place(report[max(0, match.start() - 400) :])
            return KernelError(kind, _message(match["what"], report, kind), file=file, line=line, report=report)
    if code < 0:
        name = signal.Signals(-code).name
        hint = "" if mode == "asan" else "; mode='asan' says where"
        return KernelError("crash", f"the kernel was ended by {name}: an access far out of bounds, or too much thread memory{hint}", report=report)
    return KernelError("crash", f"the process of mode {mode} ended with status {code}: {report.strip()[-300:]}", report=report)


def _message(what: str, report: str, kind: str) -> str:
    found = _OBJECT.search(report)
    parts = [what.split(" on address")[0].split(" on unknown")[0]]
    if kind == "race":
        places = [f"{file}:{line}" for file, line in _places(report)]
        parts += ["between " + " and ".join(dict.fromkeys(places[:8]))] if places else []
    else:
        parts += [access[1] for access in [_ACCESS.search(report)] if access]
    if found:
        parts.append(f"threadgroup array {_plain(found['name'])}")
    return ", ".join(parts)


def _plain(name: str) -> str:
    """`_ZZ4nameE3tmp` and `name::tmp` to `tmp`."""
    match = re.match(r"_ZZ\d+\w*?E(\d+)(\w+)$", name)
    return match[2][: int(match[1])] if match else name.rpartition("::")[2]


def _places(report: str) -> list[tuple[str, int]]:
    """Innermost lines of the user's in a report, one for each of its stacks."""
    found, inside = [], False
    for text in report.split("\n"):
        frame = _FRAME.match(text)
        if not frame:
            inside = False
        elif not inside and _is_source(frame["file"]):
            found.append((Path(frame["file"]).name, int(frame["line"])))
            inside = True
    return found


def _first_place(report: str) -> tuple[str | None, int | None]:
    direct = _DIRECT.search(report)
    if direct and _is_source(direct["file"]):
        return Path(direct["file"]).name, int(direct["line"])
    places = _places(report)
    return places[0] if places else (None, None)


def _is_source(file: str) -> bool:
    return is_users(file) and Path(file).name not in ("entry", "fiber.cpp", "scheduler.cpp", "main.cpp", "buffers.cpp", "traffic.cpp")


def explain_answer(text: str, library: Path, names: list[str]) -> KernelError:
    """The runtime's own findings: "kind, newline, text"."""
    kind, _, rest = text.partition("\n")
    if kind == "unwritten":
        index, at, size = (int(word) for word in rest.split())
        return KernelError(kind, f"byte {at} of the {size} of {names[index]} was never written, or from memory that never was", report=text)
    if kind == "two threadgroups":
        return _conflict(rest, library, names)
    match = re.search(r"(?P<file>[^\s:()]+):(?P<line>\d+)", rest) if kind in ("divergence", "partial simdgroup") else None
    file, line = (Path(match["file"]).name, int(match["line"])) if match else (None, None)
    return KernelError(kind, rest, file=file, line=line, report=rest)


def _conflict(text: str, library: Path, names: list[str]) -> KernelError:
    index, offset, one, other, code, what = text.split(" ", 5)
    base, _, address = code.partition("+")
    file, line = _line_of(library, int(address or base, 16) - 1)
    message = f"threadgroup {one} {what}, threadgroup {other}: byte {offset} of {names[int(index)]}"
    return KernelError("two threadgroups", message, file=file, line=line, report=text)


def _line_of(library: Path, address: int) -> tuple[str | None, int | None]:
    symbolizer = toolchain().symbolizer
    if not symbolizer:
        return None, None
    command = [symbolizer, f"--obj={library}", "--functions=none", hex(address)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    for found in re.finditer(r"^(?P<file>.+):(?P<line>\d+):\d+$", done.stdout, re.MULTILINE):
        if _is_source(found["file"]):
            return Path(found["file"]).name, int(found["line"])
    return None, None
