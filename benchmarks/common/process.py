"""A worker process, from the side of the process that compares."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any

from ..engines import ENVIRONMENT
from .system import ROOT, Window

_THREAD_VARIABLES = ("MLXINFER_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


class WorkerError(Exception):
    """A worker reported a failure, exited, or did not answer in time."""


def convert_for_mlx_lm(model: Path, folder: Path) -> Path:
    """Convert a GGUF file without loss for mlx-lm, in float32, the fastest dtype of MLX on a CPU. A directory is returned as it is. Raises
    `WorkerError`."""
    if model.is_dir():
        return model
    command = [sys.executable, "-m", "mlxinfer", "convert", str(model), str(folder), "--dtype", "float32", "--no-measure"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise WorkerError(done.stderr.strip())
    return folder


class Process(AbstractContextManager["Process"]):
    """Starts a worker and ends it. All workers get the same number of threads, and the processors of this process."""

    def __init__(self, engine: str, threads: int, *, command: list[str] | None = None, patience_s: float = 1800.0) -> None:
        self.engine = engine
        self._patience = patience_s
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115  closed in __exit__
        variables = dict.fromkeys(_THREAD_VARIABLES, str(threads)) | ENVIRONMENT.get(engine, {})
        # An installation stores bytecode too. Compiling a working tree at every start is not part of any engine.
        variables["PYTHONDONTWRITEBYTECODE"] = ""
        self.started = perf_counter()
        self._window = Window()
        self._asked = False
        self._process = subprocess.Popen(
            command or [sys.executable, "-m", "benchmarks.common.worker", engine],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            cwd=ROOT,
            env=os.environ | variables,
            start_new_session=True,
        )

    def ask(self, do: str, **job: Any) -> dict[str, Any]:
        """Send a job and return its answer, with the share of the processors that other processes used meanwhile (`others`). Raises
        `WorkerError`."""
        if self._asked:
            self._window = Window()
        self._asked = True
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **job}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        answer: Mapping[str, Any] = json.loads(self._line())
        if "error" in answer:
            raise WorkerError(f"{self.engine}: {answer['error']}")
        return {**answer, "others": self._window.others(answer.get("cpu_s", 0.0))}

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], self._patience)[0]:
            raise WorkerError(f"{self.engine}: no answer in {self._patience:.0f} s")
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise self._ended()
        return line

    def _ended(self) -> WorkerError:
        code = self._process.wait()
        self._complaints.seek(0)
        words = self._complaints.read().decode(errors="replace").strip().splitlines()
        return WorkerError(f"{self.engine}: its process ended with {code}: {words[-1] if words else 'it said nothing'}")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # Its children too: a server must not outlive its worker.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        self._complaints.close()
