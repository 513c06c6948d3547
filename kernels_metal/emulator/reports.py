"""Turns the output of the runtime or a sanitizer into a `KernelError` with a line of the user's source."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

from .build import toolchain
from .errors import KernelError

# Pattern in a sanitizer's report -> kind; the first match wins.
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


def explain_death(mode: str, report: str, code: int, files: frozenset[str]) -> KernelError:
    """The error for a process that a sanitizer or a signal ended before its answer."""
    for pattern, kind in _SANITIZERS:
        match = re.search(pattern, report)
        if match:
            places = _places(report, files)
            file, line = places[0] if places else (None, None)
            return KernelError(kind, _message(match["what"], report, kind, places), file=file, line=line, report=report)
    if code < 0:
        name = signal.Signals(-code).name
        hint = "" if mode == "asan" else "; mode='asan' says where"
        return KernelError(
            "crash", f"the kernel was ended by {name}: an access far out of bounds, or too much thread memory{hint}", report=report
        )
    return KernelError("crash", f"the process of mode {mode} ended with status {code}: {report.strip()[-300:]}", report=report)


def _message(what: str, report: str, kind: str, places: list[tuple[str, int]]) -> str:
    found = _OBJECT.search(report)
    parts = [what.split(" on address")[0].split(" on unknown")[0]]
    if kind == "race":
        parts += ["between " + " and ".join(dict.fromkeys(f"{file}:{line}" for file, line in places))] if places else []
    else:
        parts += [access[1] for access in [_ACCESS.search(report)] if access]
    if found:
        parts.append(f"threadgroup array {_plain(found['name'])}")
    return ", ".join(parts)


def _plain(name: str) -> str:
    """The variable's name: `tmp` for `_ZZ4nameE3tmp` and `name::tmp`."""
    match = re.match(r"_ZZ\d+\w*?E(\d+)(\w+)$", name)
    return match[2][: int(match[1])] if match else name.rpartition("::")[2]


def _places(report: str, files: frozenset[str]) -> list[tuple[str, int]]:
    """Lines of the user's source in a report: the innermost of each stack."""
    found, inside = [], False
    for text in report.split("\n"):
        frame = _FRAME.match(text) or _DIRECT.match(text)
        if not frame:
            inside = False
            continue
        file = next((name for name in files if frame["file"] == name or frame["file"].endswith("/" + name)), None)
        if file and not inside:
            found.append((file, int(frame["line"])))
            inside = bool(_FRAME.match(text))
    return found


def explain_answer(text: str, library: Path, files: frozenset[str], items: list[tuple[str, int]]) -> KernelError:
    """The error for a finding of the runtime, "kind, newline, text". `items` are name and bytes per element of each argument."""
    kind, _, rest = text.partition("\n")
    if kind == "unwritten":
        index, offset = (int(word) for word in rest.split())
        return KernelError(kind, f"{_element(items[index], offset)} was never written", report=text)
    if kind == "undefined":
        code, _, what = rest.partition(" ")
        file, line = _line_of(library, files, int(code) - 1)  # the address that the check returns to
        return KernelError(kind, what, file=file, line=line, report=rest)
    if kind in ("race", "two threadgroups"):
        return _conflict(kind, rest, library, files, items)
    match = re.search(r"(?P<file>[^\s:()]+):(?P<line>\d+)", rest) if kind in ("divergence", "partial simdgroup") else None
    file, line = (Path(match["file"]).name, int(match["line"])) if match else (None, None)
    return KernelError(kind, rest.rstrip(), file=file, line=line, report=rest)


def _element(item: tuple[str, int], offset: int) -> str:
    return f"element {offset // item[1]} of {item[0]}"


def _conflict(kind: str, text: str, library: Path, files: frozenset[str], items: list[tuple[str, int]]) -> KernelError:
    region, offset, now, before, one, other, does, did, array = text.split(" ", 8)
    file, line = _line_of(library, files, int(now) - 1)  # the address that the access returns to
    other_file, other_line = _line_of(library, files, int(before) - 1)
    what = f"byte {offset} of threadgroup array {array}" if array else _element(items[int(region)], int(offset))
    who = "thread" if kind == "race" else "threadgroup"
    message = f"{who} {one} {does} {what}, which {who} {other} {did} at {other_file}:{other_line}"
    if kind == "race":
        message += ", with no barrier for that memory between"
    return KernelError(kind, message, file=file, line=line, report=text)


def _line_of(library: Path, files: frozenset[str], address: int) -> tuple[str | None, int | None]:
    command = [toolchain("fast").symbolizer, f"--obj={library}", "--functions=none", hex(address)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    frames = "\n".join(f"  #{i} in x {text}" for i, text in enumerate(done.stdout.split("\n")) if text)
    places = _places(frames, files)
    return places[0] if places else (None, None)
