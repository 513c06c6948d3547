"""Computes a step again that the GPU aborted, before any kernel is disabled: macOS aborts command buffers because of other programs, and
because they take long. Prompts are then read in shorter steps for a while."""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter

import mlx.core as mx

from ...errors import GpuFaultError, one_line
from ...util.device import clear_cache
from ...util.gpu_fault import GpuFault, gpu_fault
from ..core.sequence import Sequence

_RETRIES = {GpuFault.OTHERS: 3, GpuFault.MEMORY: 0, GpuFault.SLOW: 1, GpuFault.OWN: 0, GpuFault.UNKNOWN: 1}
"""Retries, by kind, of a step that makes no progress and keeps its rows."""
_SHORTER = 4
"""Retries of such a step with fewer rows of prompts each time."""
_LEAST_ROWS = 128
"""Rows of prompts below which a step is not halved."""
_SHORT_S = 3600.0
"""Seconds for which steps stay short."""


class GpuFaults:
    """Counts the faults of an engine's steps, and limits the rows of prompts in the next ones."""

    def __init__(self) -> None:
        self._rows: int | None = None
        self._until = 0.0
        self._tries = 0
        self._known: dict[int, int] = {}

    def most_rows(self) -> int | None:
        """Return the maximum rows of prompts in a step; None for no limit."""
        if self._rows is not None and perf_counter() >= self._until:
            self._rows = None
        return self._rows

    def may_retry(self, error: BaseException, running: Iterable[Sequence], prefill_rows: int) -> bool:
        """Return True if the step should be computed again with the same kernels. `prefill_rows`: rows of prompts in the largest step that
        may have failed."""
        kind = gpu_fault(error)
        if kind is None:
            return False
        known = {s.arrival: len(s.tokens) for s in running}
        stuck = any(count == self._known.get(arrival) for arrival, count in known.items())
        self._known, self._tries = known, self._tries + 1 if stuck else 1
        shorter = kind in (GpuFault.SLOW, GpuFault.MEMORY) and prefill_rows > _LEAST_ROWS
        if shorter:
            self._rows, self._until = max(prefill_rows // 2, _LEAST_ROWS), perf_counter() + _SHORT_S
        return self._tries <= (_SHORTER if shorter else _RETRIES[kind])

    def explain(self, error: BaseException) -> None:
        """Raise `GpuFaultError` in place of an error that other programs or long work caused."""
        self._known.clear()
        if gpu_fault(error) in (GpuFault.OTHERS, GpuFault.SLOW, GpuFault.UNKNOWN):
            raise GpuFaultError(
                f"the GPU aborted the computation {self._tries} times ({one_line(error)}): close other programs that use the GPU, "
                "or send shorter prompts; if this continues, restart this program, and then the computer"
            ) from error

    def drain(self) -> None:
        """Wait for all submitted work of this thread, and drop its faults: they belong to steps that are computed again."""
        for _ in range(3):
            try:
                mx.synchronize()
            except RuntimeError:
                continue
            break
        clear_cache()
