"""The compiler: which one, whether it can do all that is needed, and its flags."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

INSTALL = "apt-get install clang-19 libclang-rt-19-dev llvm-19"
OLDEST = 17
CPU_FEATURES = ("avx2", "fma", "f16c")

PRELUDE = Path(__file__).parent / "msl"
RUNTIME = Path(__file__).parent / "runtime"

# C++ for OpenCL without its library: address spaces, vectors, swizzles and half as Metal has them. The generic address space is on as
# structs cannot be copied without it; lint.py finds its uses.
LANGUAGE = (
    *("-x", "cl", "-cl-std=clc++2021", "-cl-no-stdinc", "-target", "x86_64-pc-linux-gnu"),
    *("-ffp-contract=off", "-g", "-fPIC", "-fvisibility=hidden"),
    *("-Xclang", "-fnative-half-type", "-Xclang", "-fnative-half-arguments-and-returns", "-Xclang", "-fbfloat16-excess-precision=none"),
    *("-Xclang", "-cl-ext=-all,+cl_khr_fp16,+__opencl_c_generic_address_space"),
    *("-Wno-unknown-attributes", "-Wno-ignored-attributes", "-Wno-unused-value", "-Wno-c++2b-extensions", "-Wno-unknown-pragmas"),
)


@dataclass(frozen=True)
class Mode:
    """kernel: flags of both compilations of a kernel; passes: of the second only; process: of the program that runs it."""

    kernel: tuple[str, ...]
    passes: tuple[str, ...] = ()
    process: tuple[str, ...] = ()


def _flags(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_TRACE = (
    "-asan-instrumentation-with-call-threshold=0 -asan-opt-same-temp=0 -asan-stack=0 -asan-globals=0 -asan-kernel-mem-intrinsic-prefix=1"
)
_ADDRESS = "-fsanitize=address,undefined,float-cast-overflow"
FLAGS = {
    "fast": Mode(_flags("-O2 -mavx2 -mfma -mf16c")),
    "asan": Mode(
        _flags(f"-O1 -mf16c {_ADDRESS} -fno-sanitize-recover=all -fno-sanitize=vptr,function -fno-omit-frame-pointer"),
        process=_flags("-fsanitize=address,undefined"),
    ),
    "tsan": Mode(_flags("-O1 -mf16c -fsanitize=thread"), process=_flags("-fsanitize=thread")),
    "msan": Mode(_flags("-O1 -mf16c -fsanitize=memory -fsanitize-memory-track-origins"), process=_flags("-fsanitize=memory")),
    # Calls in place of the checks of AddressSanitizer, whose library is not there: traffic.cpp answers them.
    "trace": Mode(
        _flags("-O1 -mf16c -fsanitize=kernel-address -fno-vectorize -fno-slp-vectorize"),
        passes=tuple(word for option in _TRACE.split() for word in ("-mllvm", option)),
    ),
}


@dataclass(frozen=True)
class Toolchain:
    compiler: str
    version: str
    symbolizer: str | None


def available() -> bool:
    """Whether kernels can be run here; `why_not()` says why they cannot."""
    return why_not() is None


def why_not() -> str | None:
    found = find()
    return found if isinstance(found, str) else None


@cache
def find() -> Toolchain | str:
    """The newest usable clang, or the reason why there is none."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        return f"the emulator runs on Linux on x86-64, and this is {platform.system()} on {platform.machine()}"
    lacking = [feature for feature in CPU_FEATURES if feature not in _cpu_features()]
    if lacking:
        return f"this processor lacks {', '.join(lacking)}"
    reasons = []
    for compiler in _candidates():
        problem = _problem(compiler)
        if problem is None:
            return Toolchain(compiler, _version(compiler), _symbolizer(compiler))
        reasons.append(f"{compiler} {problem}")
    return f"{'; '.join(reasons) or 'no clang was found'} ({INSTALL})"


def _candidates() -> list[str]:
    """Newest first, then what is called just clang++."""
    numbered = [f"clang++-{number}" for number in range(24, OLDEST - 1, -1)]
    preferred = os.environ.get("MLXINFER_EMULATOR_CLANG")
    names = [preferred] if preferred else ["clang++-19", *numbered, "clang++"]
    found = [path for name in names if (path := shutil.which(name))]
    return list(dict.fromkeys(found))


def _problem(compiler: str) -> str | None:
    match = re.search(r"version (\d+)", _version(compiler))
    if not match or int(match[1]) < OLDEST:
        return f"is older than {OLDEST}"
    missing = [name for name in ("builtins", "asan", "tsan", "msan") if not _has_runtime(compiler, name)]
    if missing:
        return f"lacks its libraries {', '.join(missing)}"
    return None


@cache
def _version(compiler: str) -> str:
    return _output(compiler, "--version").split("\n", 1)[0]


def _has_runtime(compiler: str, name: str) -> bool:
    """The two ways to name them: lib/linux/libclang_rt.X-x86_64.a, lib/x86_64-.../libclang_rt.X.a."""
    names = (f"libclang_rt.{name}-x86_64.a", f"libclang_rt.{name}.a")
    return any(Path(_output(compiler, f"-print-file-name={name}").strip()).is_absolute() for name in names) or any(
        (Path(_output(compiler, "-print-resource-dir").strip()) / "lib" / "linux" / name).exists() for name in names
    )


def _symbolizer(compiler: str) -> str | None:
    """Of the same LLVM: it turns addresses into lines."""
    beside = Path(compiler).resolve().parent / "llvm-symbolizer"
    return str(beside) if beside.exists() else shutil.which("llvm-symbolizer-19") or shutil.which("llvm-symbolizer")


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
