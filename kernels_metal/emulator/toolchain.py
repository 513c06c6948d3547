"""Finds and checks the compiler of each mode, and defines its flags."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from . import trial

INSTALL = "apt-get install clang-19 libclang-rt-19-dev llvm-19"
OLDEST = 17
CPU_FEATURES = ("avx2", "fma", "f16c")

PRELUDE = Path(__file__).parent / "msl"
RUNTIME = Path(__file__).parent / "runtime"

# C++ for OpenCL without its library: address spaces, vectors, swizzles and half as in Metal. The generic address space is enabled because
# structs cannot be copied without it; lint.py finds its uses.
LANGUAGE = (
    *("-x", "cl", "-cl-std=clc++2021", "-cl-no-stdinc", "-target", "x86_64-pc-linux-gnu"),
    *("-ffp-contract=off", "-gline-tables-only", "-fPIC", "-fvisibility=hidden"),
    *("-Xclang", "-fnative-half-type", "-Xclang", "-fnative-half-arguments-and-returns", "-Xclang", "-fbfloat16-excess-precision=none"),
    *("-Xclang", "-cl-ext=-all,+cl_khr_fp16,+__opencl_c_generic_address_space,+__cl_clang_non_portable_kernel_param_types"),
    *("-Wno-unknown-attributes", "-Wno-ignored-attributes", "-Wno-unused-value", "-Wno-c++2b-extensions", "-Wno-unknown-pragmas"),
)


@dataclass(frozen=True)
class Mode:
    """Compiler flags of a mode."""

    optimization: tuple[str, ...]
    """For a kernel. Most kernels run once on little data, and full optimization would take several times as long as the run."""
    sanitizers: tuple[str, ...] = ()
    """For a kernel, also while its first IR is emitted."""
    passes: tuple[str, ...] = ()
    """For the compiler's passes on a kernel."""
    process: tuple[str, ...] = ()
    """For the program that runs kernels."""
    instrumented_first: bool = False
    """Instrument before optimizing. The optimizer may assume anything about undefined values, and drops unused accesses."""


def _flags(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_ADDRESS = "-fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all -fno-sanitize=vptr,function"
# Calls instead of AddressSanitizer's inline checks. trace.cpp implements the calls; the sanitizer's library is not linked.
_TRACE = (
    "-asan-instrumentation-with-call-threshold=0 -asan-opt-same-temp=0 -asan-stack=0 -asan-globals=0 -asan-kernel-mem-intrinsic-prefix=1"
)
_FRAMES = _flags("-mf16c -fno-omit-frame-pointer -fno-optimize-sibling-calls")  # keeps stack traces complete
_SMALL = ("-O1", *_FRAMES)  # -O0 would instrument every access to a variable
FLAGS = {
    "fast": Mode(_flags("-O0 -mavx2 -mfma -mf16c")),
    "asan": Mode(("-O0", *_FRAMES), _flags(_ADDRESS), process=_flags("-fsanitize=address,undefined"), instrumented_first=True),
    "tsan": Mode(_SMALL, _flags("-fsanitize=thread"), process=_flags("-fsanitize=thread")),
    "msan": Mode(
        ("-O0", *_FRAMES),
        _flags("-fsanitize=memory -fsanitize-memory-track-origins"),
        process=_flags("-fsanitize=memory"),
        instrumented_first=True,
    ),
    "trace": Mode(_SMALL, _flags("-fsanitize=kernel-address"), tuple(word for option in _TRACE.split() for word in ("-mllvm", option))),
}


TITLES = {"asan": "AddressSanitizer", "tsan": "ThreadSanitizer", "msan": "MemorySanitizer"}


@dataclass(frozen=True)
class Toolchain:
    """A compiler that works in some mode, with its tools."""

    compiler: str
    """Path of clang++."""
    version: str
    """First line of its `--version`."""
    linker: str
    """Path of ld."""
    builtins: str
    """Path of compiler-rt's builtins (bfloat16 conversions and the like), which libgcc lacks on some systems."""
    symbolizer: str
    """Path of llvm-symbolizer."""
    libraries: tuple[str, ...] = ()
    """Linker options that programs of the mode need."""


def available(mode: str = "fast") -> bool:
    """True if kernels can run here in a mode; otherwise `why_not(mode)` has the reason."""
    return why_not(mode) is None


def why_not(mode: str = "fast") -> str | None:
    """Reason why kernels cannot run here in a mode, or None."""
    found = find(mode)
    return found if isinstance(found, str) else None


@cache
def find(mode: str = "fast") -> Toolchain | str:
    """A clang whose programs link and run in the mode, preferably version 19; or the reason why none was found."""
    reason = _unfit_machine()
    if reason:
        return reason
    reasons = []
    for compiler in _candidates():
        found = _toolchain(compiler, mode)
        if isinstance(found, Toolchain):
            return found
        reasons.append(f"{_name(compiler)}: {found}")
    return f"no {TITLES.get(mode, 'compiler')} for Metal kernels: {'; '.join(reasons) or 'no clang was found'} ({INSTALL})"


def _unfit_machine() -> str | None:
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        return f"the emulator runs on Linux on x86-64, and this is {platform.system()} on {platform.machine()}"
    lacking = [feature for feature in CPU_FEATURES if feature not in _cpu_features()]
    return f"this processor lacks {', '.join(lacking)}" if lacking else None


def _candidates() -> list[str]:
    """Compilers to try. clang 19 is first because all modes are known to work with it."""
    numbered = [f"clang++-{number}" for number in range(24, OLDEST - 1, -1)]
    preferred = os.environ.get("MLXINFER_EMULATOR_CLANG")
    names = [preferred] if preferred else ["clang++-19", *numbered, "clang++"]
    found = [path for name in names if (path := shutil.which(name))]
    return list(dict.fromkeys(found))


def _toolchain(compiler: str, mode: str) -> Toolchain | str:
    common = _common(compiler)
    if isinstance(common, str):
        return common
    reasons = []
    for libraries in _libraries(compiler):
        reason = trial.problem(compiler, [*FLAGS[mode].process, *libraries])
        if reason is None:
            return replace(common, libraries=libraries)
        reasons.append(reason)
    return reasons[0]


@cache
def _common(compiler: str) -> Toolchain | str:
    """The toolchain without options of a mode, or the part that is missing."""
    version = _version(compiler)
    number = _number(version)
    builtins = _output(compiler, "-rtlib=compiler-rt", "-print-libgcc-file-name").strip()
    linker = shutil.which("ld") or shutil.which("ld.lld")
    if not number or number < OLDEST:
        return f"is older than {OLDEST}"
    if not Path(builtins).is_file():
        return "lacks its library of builtins"
    if not linker:
        return "there is no linker (ld)"
    symbolizer = _symbolizer(compiler)
    return Toolchain(compiler, version, linker, builtins, symbolizer) if symbolizer else "has no llvm-symbolizer"


def _libraries(compiler: str) -> list[tuple[str, ...]]:
    """Sets of linker options to try. Swift's clang can link ThreadSanitizer only together with libdispatch, whose calls it intercepts."""
    swift = Path(compiler).resolve().parents[1] / "lib" / "swift" / "linux"
    dispatch = (f"-L{swift}", "-ldispatch", "-lBlocksRuntime", f"-Wl,-rpath,{swift}")
    return [(), dispatch] if (swift / "libdispatch.so").exists() else [()]


def _name(compiler: str) -> str:
    number = _number(_version(compiler))
    return f"{Path(compiler).name} {number}" if number else Path(compiler).name


def _number(version: str) -> int | None:
    match = re.search(r"version (\d+)", version)
    return int(match[1]) if match else None


@cache
def _version(compiler: str) -> str:
    return _output(compiler, "--version").split("\n", 1)[0]


def _symbolizer(compiler: str) -> str:
    """Path of llvm-symbolizer of the same LLVM, which translates addresses to lines."""
    beside = Path(compiler).resolve().parent / "llvm-symbolizer"
    return str(beside) if beside.exists() else shutil.which("llvm-symbolizer-19") or shutil.which("llvm-symbolizer") or ""


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


@cache
def _cpu_features() -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    match = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return frozenset(match[1].split()) if match else frozenset()
