"""What links between machines cost, computed from their latency and bandwidth: not measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..loading.load import PreparedModel
from ..models.decoder import BlockStack
from ..util.dataclass import dataclass
from .plan import SplitPlan


@dataclass(frozen=True, slots=True)
class Link:
    """A connection between two machines."""

    name: str
    """For people."""
    latency_s: float
    """Seconds until the first byte of a message is there."""
    bytes_per_s: float
    """Bytes per second from then on."""

    def seconds(self, size: float) -> float:
        """A message of so many bytes."""
        return self.latency_s + size / self.bytes_per_s


LINKS = (
    Link("Thunderbolt 5, RDMA", 50e-6, 7.3e9),
    Link("Thunderbolt, TCP", 300e-6, 4.0e9),
    Link("10 Gb Ethernet", 300e-6, 1.18e9),
    Link("1 Gb Ethernet", 300e-6, 118e6),
)
"""Latency of RDMA over Thunderbolt (below 50 µs) and of TCP (250 to 350 µs), and 7.3 GB/s for RDMA, as others report them; the nominal
bandwidth of Ethernet less its headers."""


@dataclass(frozen=True, slots=True)
class Job:
    """What is asked of the machines."""

    hidden: int
    """Channels of a row."""
    blocks: int
    """Blocks of the model."""
    row_bytes: int
    """Bytes of a number in a row: 2 in 16 bits."""
    weights: Sequence[float]
    """Bytes that each rank reads for a token: its weights."""
    bandwidth: Sequence[float]
    """Bytes per second that each rank reads from memory."""


def pipeline_bytes(job: Job) -> int:
    """Bytes on all links for a decoded token: a row from each rank to the next, and from the last back to rank 0."""
    return len(job.weights) * job.hidden * job.row_bytes


def tensor_bytes(job: Job) -> int:
    """The same where heads and columns are divided: two sums of a row per block and one for the embedding, in each of which a rank sends
    2 (n - 1) / n rows around the ring."""
    ranks = len(job.weights)
    return ranks * (2 * job.blocks + 1) * job.hidden * job.row_bytes * 2 * (ranks - 1) // ranks


def pipeline_tokens_s(job: Job, link: Link) -> float:
    """Tokens per second of one answer: ranks compute one after another."""
    reading = sum(size / speed for size, speed in zip(job.weights, job.bandwidth, strict=True))
    return 1 / (reading + len(job.weights) * link.seconds(job.hidden * job.row_bytes))


def tensor_tokens_s(job: Job, link: Link) -> float:
    """The same where each rank reads its share of every block at once: the slowest of them, and the sums."""
    ranks = len(job.weights)
    whole = sum(job.weights)
    reading = max(whole / ranks / speed for speed in job.bandwidth)
    part = job.hidden * job.row_bytes / ranks
    return 1 / (reading + (2 * job.blocks + 1) * 2 * (ranks - 1) * link.seconds(part))


def estimate_lines(found: PreparedModel, plan: SplitPlan) -> Iterator[str]:
    """What a decoded token sends, and how long that takes on each kind of link."""
    graph = found.model
    assert isinstance(graph, BlockStack)
    size = found.dtype.size * graph.hidden_size
    count = len(plan.parts)
    times = ", ".join(f"{link.name} {count * link.seconds(size) * 1e3:.2g} ms" for link in LINKS)
    yield f"a decoded token sends {count} rows of {size} bytes; on the way (computed): {times}"
