"""Estimated communication cost, computed from latency and bandwidth, not measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..loading.load import PreparedModel
from ..models.decoder import BlockStack
from ..util.dataclass import dataclass
from .plan import SplitPlan


@dataclass(frozen=True, slots=True)
class Interconnect:
    """Latency and bandwidth between two machines."""

    name: str
    latency_s: float
    """Seconds until the first byte of a message arrives."""
    bytes_per_s: float

    def seconds(self, size: float) -> float:
        """Return the transfer time of a message of `size` bytes."""
        return self.latency_s + size / self.bytes_per_s


INTERCONNECTS = (
    Interconnect("Thunderbolt 5, RDMA", 50e-6, 7.3e9),
    Interconnect("Thunderbolt, TCP", 300e-6, 4.0e9),
    Interconnect("10 Gb Ethernet", 300e-6, 1.18e9),
    Interconnect("1 Gb Ethernet", 300e-6, 118e6),
)
"""Reported figures: latency of RDMA over Thunderbolt (below 50 µs) and of TCP (250 to 350 µs), and 7.3 GB/s for RDMA. Ethernet has its
nominal bandwidth less headers."""


@dataclass(frozen=True, slots=True)
class Job:
    """Model and machines of an estimate."""

    hidden: int
    """Channels of a row."""
    blocks: int
    row_bytes: int
    """Bytes of one number in a row: 2 for 16 bits."""
    weights: Sequence[float]
    """Bytes of weights that each rank reads for a token."""
    bandwidth: Sequence[float]
    """Memory bandwidth of each rank, in bytes per second."""


def pipeline_bytes(job: Job) -> int:
    """Return the bytes sent for a decoded token: one row from each rank to the next, and from the last rank to rank 0."""
    return len(job.weights) * job.hidden * job.row_bytes


def tensor_bytes(job: Job) -> int:
    """Return the bytes sent for a decoded token with tensor parallelism.

    Each block sums a row twice, and the embedding once. In each sum, a rank sends 2 (n - 1) / n rows around the ring.
    """
    ranks = len(job.weights)
    return ranks * (2 * job.blocks + 1) * job.hidden * job.row_bytes * 2 * (ranks - 1) // ranks


def pipeline_tokens_s(job: Job, link: Interconnect) -> float:
    """Return tokens per second of one answer: the ranks compute one after another."""
    reading = sum(size / speed for size, speed in zip(job.weights, job.bandwidth, strict=True))
    return 1 / (reading + len(job.weights) * link.seconds(job.hidden * job.row_bytes))


def tensor_tokens_s(job: Job, link: Interconnect) -> float:
    """Return tokens per second of one answer with tensor parallelism: the slowest rank's share, and the sums."""
    ranks = len(job.weights)
    whole = sum(job.weights)
    reading = max(whole / ranks / speed for speed in job.bandwidth)
    part = job.hidden * job.row_bytes / ranks
    return 1 / (reading + (2 * job.blocks + 1) * 2 * (ranks - 1) * link.seconds(part))


def estimate_lines(found: PreparedModel, plan: SplitPlan) -> Iterator[str]:
    """Describe the bytes that a decoded token sends, and their transfer time for each kind of interconnect."""
    graph = found.model
    assert isinstance(graph, BlockStack)
    size = found.dtype.size * graph.hidden_size
    count = len(plan.parts)
    times = ", ".join(f"{link.name} {count * link.seconds(size) * 1e3:.2g} ms" for link in INTERCONNECTS)
    yield f"a decoded token sends {count} rows of {size} bytes; on the way (computed): {times}"
