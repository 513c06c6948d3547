"""Compiles kernels to libraries and the runtime to a program, and stores both in the user's cache directory."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from . import lint
from .errors import KernelError, Unavailable
from .signature import users_files
from .toolchain import FLAGS, LANGUAGE, PRELUDE, RUNTIME, Toolchain, find
from .trial import cache_directory

ERROR = re.compile(r": error: (?P<text>.*)$", re.MULTILINE)
PLACE = re.compile(r"^(?P<file>[^\s:]+):(?P<line>\d+):\d+: (?:error|note):", re.MULTILINE)
# Threadgroup arrays are emitted as private and undefined, so the compiler may fold loads of elements that it sees no write to.
ARRAY = r"^(@_ZZ\d+{}E(\d+)(\w+) = )internal global (.*) undef(, align.*)$"
# %shl.mask = and i32 %distance, 31, !dbg !7
MASKED = re.compile(r"^(  %sh[lr]\.mask\d* = and i(32|64) (%?[\w.]+), (31|63)(, !dbg !\d+)?)$", re.MULTILINE)


@cache
def toolchain(mode: str) -> Toolchain:
    """The compiler for a mode. Raises `Unavailable`."""
    found = find(mode)
    if isinstance(found, str):
        raise Unavailable(found)
    return found


@cache
def _fingerprint(folder: Path) -> str:
    files = sorted(path for path in folder.iterdir() if path.suffix in (".h", ".cpp"))
    return hashlib.sha256(b"".join(path.name.encode() + path.read_bytes() for path in files)).hexdigest()


def _key(mode: str, *parts: object) -> str:
    everything = (toolchain(mode).version, LANGUAGE, _fingerprint(PRELUDE), *parts)
    return hashlib.sha256(repr(everything).encode()).hexdigest()[:24]


@cache
def library(code: str, name: str, mode: str) -> Path:
    """Path of the kernel, compiled for a mode. Raises KernelError if the source is rejected."""
    place = cache_directory() / f"{name}-{mode}-{_key(mode, code, FLAGS[mode])}.so"
    if not place.exists():
        _lint(code, name, mode)
        _compile(code, name, mode, place)
    return place


@cache
def program(mode: str) -> Path:
    """Path of a mode's runtime, the executable that runs kernels."""
    options = ["-std=c++17", "-O2", "-g1", "-fno-exceptions", f"-DEMU_{mode.upper()}=1"]
    linking = [*FLAGS[mode].process, *toolchain(mode).libraries]
    place = cache_directory() / f"runtime-{mode}-{_key(mode, _fingerprint(RUNTIME), options, linking)}"
    with open(place.parent / f"building-{mode}", "w") as alone:
        fcntl.flock(alone, fcntl.LOCK_EX)  # one process compiles, others wait
        if not place.exists():
            _build(mode, place, options, linking)
    return place


def _build(mode: str, place: Path, options: list[str], linking: list[str]) -> None:
    with tempfile.TemporaryDirectory(dir=place.parent) as folder:
        sources = [str(path) for path in sorted(RUNTIME.glob("*.cpp"))]
        _call([toolchain(mode).compiler, *options, "-c", *sources], folder)
        objects = [Path(source).stem + ".o" for source in sources]
        # The runtime is not instrumented, but linked with the sanitizer's library.
        _call([toolchain(mode).compiler, *linking, "-rdynamic", *objects, "-ldl", "-lm", "-o", "program"], folder)
        os.replace(Path(folder) / "program", place)


def _lint(code: str, name: str, mode: str) -> None:
    """Check the source once for all modes: an empty file records a clean source."""
    clean = cache_directory() / f"{name}-lint-{_key(mode, code, Path(lint.__file__).read_bytes())}"
    if clean.exists():
        return
    tree = _run(_front(mode, ["-fsyntax-only", "-w", "-fno-color-diagnostics", "-Xclang", "-ast-dump"]), input=code)
    if tree.returncode:
        raise _refused(tree.stderr, code)
    problems = lint.problems(tree.stdout, users_files(code))
    if problems:
        first = problems[0]
        raise KernelError("address space", first.text, file=first.file, line=first.line, report="\n".join(map(str, problems)))
    clean.touch()


def _compile(code: str, name: str, mode: str, place: Path) -> None:
    flags = FLAGS[mode]
    define = f"-DEMU_{mode.upper()}=1"
    ir = ["-Xclang", "-disable-llvm-passes", "-fno-discard-value-names", "-emit-llvm", "-S", "-o", "-"]
    done = _run(_front(mode, [*flags.optimization, *flags.sanitizers, define, *ir]), input=code)
    if done.returncode:
        raise _refused(done.stderr, code)
    with tempfile.TemporaryDirectory(dir=place.parent) as folder:
        checked = _with_checked_shifts(done.stdout) if mode == "asan" else done.stdout
        (Path(folder) / "kernel.ll").write_text(_with_arrays(checked, name), encoding="utf-8")
        back = [toolchain(mode).compiler, "-x", "ir", "-gline-tables-only", "-fPIC"]
        instrumenting = [*flags.sanitizers, *flags.passes]
        if flags.instrumented_first:
            _call([*back, "-O0", *instrumenting, "-S", "-emit-llvm", "kernel.ll", "-o", "instrumented.ll"], folder)
            _call([*back, *flags.optimization, "-c", "instrumented.ll", "-o", "kernel.o"], folder)
        else:
            _call([*back, *flags.optimization, *instrumenting, "-c", "kernel.ll", "-o", "kernel.o"], folder)
        # Calling the linker directly takes half as long as through the compiler; the program supplies the C library.
        _call([toolchain(mode).linker, "-shared", "kernel.o", toolchain(mode).builtins, "-o", "kernel.so"], folder)
        os.replace(Path(folder) / "kernel.so", place)


def _with_checked_shifts(ir: str) -> str:
    """Add checks of shift distances. OpenCL and Metal take them modulo the width, so UBSan reports none, but they are mistakes."""
    calls = MASKED.sub(r"  call void @__emu_shift\2(i\2 \3, i\2 \4)\5\n\1", ir)
    return calls + "\ndeclare void @__emu_shift32(i32, i32)\ndeclare void @__emu_shift64(i64, i64)\n"


def _run(command: list[str], input: str | None = None, cwd: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, input=input, cwd=cwd, capture_output=True, text=True, check=False)


def _front(mode: str, options: list[str]) -> list[str]:
    return [toolchain(mode).compiler, *LANGUAGE, "-include", str(PRELUDE / "msl.h"), *options, "-"]


def _with_arrays(ir: str, name: str) -> str:
    """Initialize threadgroup arrays, and list them (address, bytes, name) for the runtime."""
    table: list[str] = []
    names: list[str] = []
    pattern = re.compile(ARRAY.format(re.escape(name)), re.MULTILINE)
    for match in pattern.finditer(ir):
        symbol, label = match[1].split(" ")[0], match[3][: int(match[2])]
        size = f"ptrtoint (ptr getelementptr ({match[4]}, ptr null, i32 1) to i64)"
        text = f"@__emu_name{len(names)}"
        names.append(f'{text} = private constant [{len(label) + 1} x i8] c"{label}\\00"')
        table.append(f"{{ ptr, i64, ptr }} {{ ptr {symbol}, i64 {size}, ptr {text} }}")
    ir = pattern.sub(r"\1hidden global \4 zeroinitializer\5", ir).replace("spir_kernel", "")
    rows = f"[{len(table)} x {{ ptr, i64, ptr }}] [{', '.join(table)}]"
    tail = [f"@__emu_arrays = constant {rows}", f"@__emu_array_count = constant i64 {len(table)}", ""]
    return "\n".join([ir, *names, *tail])


def _call(command: list[str], folder: str) -> None:
    done = _run(command, cwd=folder)
    if done.returncode:
        raise KernelError("compile", f"{' '.join(command)} failed: {done.stderr.strip()[-500:]}", report=done.stderr)


def _refused(report: str, code: str) -> KernelError:
    """The first error at a line of the user's source: the error's own, or the line that called the prelude's template."""
    error = ERROR.search(report)
    if not error:
        return KernelError("compile", report.strip()[-300:], report=report)
    start = report.rfind("\n", 0, error.start()) + 1
    files = users_files(code)
    places = [match for match in PLACE.finditer(report, start) if match["file"] in files]
    file, line = (places[0]["file"], int(places[0]["line"])) if places else (None, None)
    return KernelError("compile", error["text"], file=file, line=line, report=report)
