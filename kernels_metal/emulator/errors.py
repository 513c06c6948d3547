"""Errors of the emulator."""

from __future__ import annotations

from ..source import readable


class Unavailable(RuntimeError):
    """Kernels cannot run on this machine, or not in this mode; usually a compiler is missing."""


class KernelError(RuntimeError):
    """A fault of a kernel or of its launch.

    `kind` is one of `KINDS`; `file` and `line` are the place in the user's source, None if unknown: `<name>.metal` is the `source` of
    `metal_kernel`, `<name>.header.metal` its `header`, both counted from 1. `report` is the tool's full output.
    """

    def __init__(self, kind: str, message: str, *, file: str | None = None, line: int | None = None, report: str = "") -> None:
        where = f"{file}:{line}: " if file and line else ""
        super().__init__(f"{kind}: {where}{readable(message)}")
        self.kind, self.file, self.line, self.report = kind, file, line, readable(report)


KINDS = {
    "launch": "arguments that MLX or the GPU would refuse",
    "compile": "the compiler refuses the source",
    "address space": "a pointer or reference without device, constant, threadgroup or thread; or what Metal's C++ does not have",
    "threadgroup memory": "threadgroup arrays of more than 32 KiB together",
    "bounds": "an access beyond a buffer or an array (asan)",
    "undefined": "undefined behaviour of C++: overflow, misaligned access, conversion out of range (asan)",
    "race": "two threads of a threadgroup touch the same memory, one of them writing, without a barrier between (tsan)",
    "uninitialised": "a decision, an address or a result hangs on memory that was never written (msan)",
    "unwritten": "a part of an output that was never written (msan)",
    "divergence": "threads wait for one another in different places (every mode)",
    "partial simdgroup": "a simd operation in a simdgroup of fewer than 32 threads (every mode)",
    "two threadgroups": "two threadgroups touch the same byte, one of them writing (trace)",
    "crash": "the process that ran the kernel has died",
    "timeout": "the kernel did not end in time",
}
