"""All pools of one model: their memory, statistics and faults."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import MLXInferError
from ..util.dataclass import dataclass
from ..util.device import clear_cache
from .file_format import ExpertFile, LayerRecord
from .pool import LEAST_SLOTS, Allocate, ExpertPool, ReadbackClock
from .reader import THREADS, ExpertReader, ReadInto


@dataclass(frozen=True, slots=True)
class OffloadStats:
    """Totals of all layers since the model was loaded."""

    bytes_read: int
    hits: int
    """Chosen experts that were resident. An expert counts once for each layer and step that chooses it."""
    misses: int
    """Chosen experts that were not resident, even if a prediction had started to read them."""
    predicted: int
    """Reads that predictions started."""
    predicted_used: int
    """Predicted reads whose expert was chosen in the next step."""
    waiting_s: float
    """Time in which the computation waited for reads."""
    resident_bytes: int
    """Bytes of all slots."""
    slots: int
    experts: int

    @property
    def hit_rate(self) -> float:
        """Share of chosen experts that were resident; 1 before the first."""
        return self.hits / (self.hits + self.misses) if self.hits + self.misses else 1.0


class ExpertStore:
    """The routed experts of a model: some in memory, all in a file."""

    def __init__(
        self,
        file: ExpertFile,
        budget_bytes: int,
        *,
        slots: Mapping[str, int] | None = None,
        threads: int = THREADS,
        allocate: Allocate | None = None,
        read: ReadInto | None = None,
    ) -> None:
        """Make pools of `budget_bytes` together, or of the least that works. Raises `ExpertReadError`.

        `slots` by key replaces `slots_within`. `allocate` makes the arrays of the pools. `read` replaces `os.preadv` in tests. The store
        closes the file.
        """
        self.file, self.budget_bytes = file, budget_bytes
        self._reader = ExpertReader(file, threads, read)
        self._clock = ReadbackClock()
        self._fault: MLXInferError | None = None
        slots = slots or slots_within(file.layers, budget_bytes)
        self.pools: dict[str, ExpertPool] = {}
        """By the key of the layer."""
        try:
            for key, layer in file.layers.items():
                self.pools[key] = ExpertPool(layer, self._reader, slots[key], self._clock, allocate)
        except BaseException:
            self.close()
            raise

    @property
    def is_complete(self) -> bool:
        """True if all experts are resident."""
        return all(pool.is_complete for pool in self.pools.values())

    @property
    def resident_bytes(self) -> int:
        """Bytes of all slots."""
        return sum(pool.resident_bytes for pool in self.pools.values())

    def resize(self, nbytes: int, *, slots: Mapping[str, int] | None = None) -> None:
        """Let all pools together take `nbytes`, or the least that works. All work of the device must be done.

        Pools that shrink do so first. Each needs memory for its old and its new slots for a moment. The arrays of resized pools are new
        objects. `slots` as in the constructor. Raises `ExpertReadError`.
        """
        self.budget_bytes = nbytes
        wanted = slots or slots_within(self.file.layers, nbytes)
        for key, pool in sorted(self.pools.items(), key=lambda item: wanted[item[0]] - item[1].slots):
            if pool.slots != wanted[key]:
                pool.resize(wanted[key])
                clear_cache()

    def stats(self) -> OffloadStats:
        pools = self.pools.values()
        return OffloadStats(
            bytes_read=sum(pool.bytes_read for pool in pools),
            hits=sum(pool.hits for pool in pools),
            misses=sum(pool.misses for pool in pools),
            predicted=sum(pool.predicted for pool in pools),
            predicted_used=sum(pool.predicted_used for pool in pools),
            waiting_s=sum(pool.waiting_s for pool in pools),
            resident_bytes=self.resident_bytes,
            slots=sum(pool.slots for pool in pools),
            experts=sum(pool.experts for pool in pools),
        )

    def record_fault(self, error: MLXInferError) -> None:
        """Record an error of `waves` where it cannot be raised. The results of the step are garbage."""
        if self._fault is None:
            self._fault = error

    @property
    def fault(self) -> MLXInferError | None:
        """The first recorded error since `take_fault`."""
        return self._fault

    def take_fault(self) -> MLXInferError | None:
        """Return the recorded error and forget it."""
        fault, self._fault = self._fault, None
        return fault

    def close(self) -> None:
        """End all reads, drop the arrays and close the file."""
        self._reader.close()
        for pool in self.pools.values():
            pool.close()
        self.file.close()


def slots_within(layers: Mapping[str, LayerRecord], nbytes: int) -> dict[str, int]:
    """Slots per layer for `nbytes` in all: the same share of the experts of each layer, at least `LEAST_SLOTS`."""
    total = sum(layer.experts * layer.expert_bytes for layer in layers.values())
    share = min(nbytes / total, 1.0) if total else 1.0
    slots = {key: max(int(layer.experts * share), min(LEAST_SLOTS, layer.experts)) for key, layer in layers.items()}
    left = nbytes - sum(slots[key] * layer.expert_bytes for key, layer in layers.items())
    for key, layer in layers.items():
        if slots[key] < layer.experts and layer.expert_bytes <= left:
            slots[key] += 1
            left -= layer.expert_bytes
    return slots
