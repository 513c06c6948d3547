"""Processes that run kernels, one per mode. A process starts at the first launch, and again after a crash."""

from __future__ import annotations

import atexit
import os
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from select import select

from . import build
from .errors import KernelError
from .modes import ORDERS
from .reports import explain_answer, explain_death
from .trial import fixed_addresses

INPUT, OUTPUT, PREFILLED = range(3)
MOST_TSAN_FIBERS = 224  # tsan distinguishes about 250 threads; after more, a process misses races
TRAFFIC = struct.Struct("<7Q")  # as Traffic in runtime/device.h

_SANITIZERS = {
    "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:allocator_may_return_null=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1:report_signal_unsafe=0:history_size=4:atexit_sleep_ms=0",
    "MSAN_OPTIONS": "halt_on_error=1:poison_in_malloc=0:poison_in_free=0",  # the runtime itself is not instrumented
}


@dataclass(frozen=True)
class Argument:
    """A buffer of a launch."""

    name: str
    """Name in the kernel."""
    kind: int
    """`INPUT`, `OUTPUT` or `PREFILLED`."""
    size: int
    """Bytes of the buffer."""
    item: int
    """Bytes per element."""
    content: bytes | memoryview = b""
    """Empty for an output that is not prefilled."""


@dataclass(frozen=True)
class Request:
    """One launch."""

    library: Path
    """The compiled kernel."""
    grid: tuple[int, int, int]
    """Threads along each axis."""
    threadgroup: tuple[int, int, int]
    """Threads of a threadgroup along each axis."""
    order: str
    """One of `ORDERS`."""
    seed: int
    """Seed of the random order."""
    files: frozenset[str]
    """Names of the user's source files in reports."""
    arguments: Sequence[Argument]
    """In the order of the kernel's parameters."""

    def head(self) -> bytes:
        """Bytes of the request for the runtime, without the arguments' contents."""
        path = os.fsencode(self.library)
        numbers = (*self.grid, *self.threadgroup, ORDERS.index(self.order), len(self.arguments))
        kinds = b"".join(struct.pack("<QQ", argument.size, argument.kind) for argument in self.arguments)
        return struct.pack("<I", len(path)) + path + struct.pack("<8IQ", *numbers, self.seed & (1 << 64) - 1) + kinds


@dataclass(frozen=True)
class Answer:
    """Result of a launch, per argument."""

    contents: list[bytearray]
    """Content after the launch; empty for inputs."""
    traffic: list[tuple[int, ...]]
    """The fields of `Traffic` after `size`."""


class Worker:
    """One process. It handles one launch at a time: see `launch`."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115
        environment = {**os.environ, **_SANITIZERS}
        environment.update({f"{tool}_SYMBOLIZER_PATH": build.toolchain(mode).symbolizer for tool in ("ASAN", "TSAN", "MSAN", "UBSAN")})
        command = [*fixed_addresses(), str(build.program(mode))]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, env=environment, bufsize=0
        )

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe:
                pipe.close()
        try:
            self.process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.errors.close()

    def launch(self, request: Request, timeout: float) -> Answer:
        """Run one kernel; `timeout` is in seconds. After a KernelError, the process must be replaced."""
        deadline = time.monotonic() + timeout
        os.ftruncate(self.errors.fileno(), 0)
        self.errors.seek(0)
        try:
            self._send(request)
            (failed,) = struct.unpack("<I", self._receive(4, deadline))
            if not failed:
                return self._answer(request, deadline)
            (length,) = struct.unpack("<I", self._receive(4, deadline))
            text = self._receive(length, deadline).decode("utf-8", errors="replace")
        except (BrokenPipeError, EOFError):
            self.process.wait()
            self.errors.seek(0)
            report = self.errors.read().decode("utf-8", errors="replace")
            raise explain_death(self.mode, report, self.process.returncode, request.files) from None
        raise explain_answer(text, request.library, request.files, [(a.name, a.item) for a in request.arguments])

    def _send(self, request: Request) -> None:
        for part in (request.head(), *(a.content for a in request.arguments if a.kind != OUTPUT)):
            left = memoryview(part).cast("B") if len(part) else memoryview(b"")
            while left:
                left = left[os.write(self._pipe("stdin"), left) :]

    def _answer(self, request: Request, deadline: float) -> Answer:
        contents, traffic = [], []
        for argument in request.arguments:
            traffic.append(TRAFFIC.unpack(self._receive(TRAFFIC.size, deadline)))
            contents.append(self._receive(0 if argument.kind == INPUT else argument.size, deadline))
        return Answer(contents, traffic)

    def _receive(self, size: int, deadline: float) -> bytearray:
        pipe, content = self._pipe("stdout"), bytearray(size)
        left = memoryview(content)
        while left:
            if not select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
                self.process.kill()
                raise KernelError("timeout", "the kernel did not end in time (emulator.settings(timeout=...) gives it more)")
            got = os.readv(pipe, [left])
            if not got:
                raise EOFError
            left = left[got:]
        return content

    def _pipe(self, name: str) -> int:
        return int(getattr(self.process, name).fileno())


_lock = threading.RLock()
_workers: dict[tuple[int, str], Worker] = {}


def launch(mode: str, request: Request, timeout: float) -> Answer:
    """Run a kernel in the process of this mode. Raises KernelError. `timeout` is in seconds."""
    with _lock:
        key = (os.getpid(), mode)  # after a fork, the pipes belong to the parent
        if key not in _workers:
            _workers[key] = Worker(mode)
        worker = _workers[key]
        used_up = True
        try:
            answer = worker.launch(request, timeout)
            used_up = mode == "tsan" and prod(request.threadgroup) > MOST_TSAN_FIBERS
            return answer
        finally:
            if used_up:
                del _workers[key]
                worker.close()


@atexit.register
def close() -> None:
    """End the processes; the next launch starts new ones."""
    with _lock:
        for key in [key for key in _workers if key[0] == os.getpid()]:
            _workers.pop(key).close()
