"""The launches of a submitted graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from . import fused, primitives, products
from .graph import Graph
from .layout import Laid, rows
from .primitives import Architecture, Launch, Rule

M4 = Architecture(16, "g")
"""The default chip."""

_RULES: dict[str, Rule] = {
    **dict.fromkeys(primitives.VIEWS, primitives.view),
    **dict.fromkeys(primitives.ELEMENTWISE, primitives.elementwise),
    **dict.fromkeys(primitives.SINGLE, primitives.single),
    **dict.fromkeys(primitives.TOUCHING, primitives.touching),
    **dict.fromkeys(("ArgPartition", "ArgSort", "Partition", "Sort"), primitives.sort),
    "Concatenate": primitives.concatenate,
    "Contiguous": primitives.contiguous,
    "Pad": primitives.pad,
    "DynamicSlice": primitives.dynamic_slice,
    "Quantize": fused.whole,
    "GatedDelta": fused.delta,
    "QuantizedMatmul": products.quantized,
    "GatherQMM": products.gathered,
    "GatherMM": products.gathered,
    "Matmul": products.plain,
    "AddMM": products.plain,
    "RMSNorm": fused.norm,
    "LayerNorm": fused.norm,
    "RoPE": fused.rope,
    "SDPA": fused.attention,
    "CustomKernel": fused.custom,
}


class UnknownPrimitiveError(Exception):
    """A graph has a primitive without a rule for its cost."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """The launches of submissions, in an order in which they can run. `stages` of them depend on one another."""

    launches: tuple[Launch, ...]
    stages: int

    @property
    def count(self) -> int:
        return len(self.launches)

    @property
    def reads(self) -> int:
        """Bytes, including repeated ones."""
        return sum(launch.reads for launch in self.launches)

    @property
    def distinct(self) -> int:
        """Bytes without those that a launch reads again, which caches deliver."""
        return self.reads - sum(launch.repeated for launch in self.launches)

    @property
    def writes(self) -> int:
        """Bytes."""
        return sum(launch.writes for launch in self.launches)

    @property
    def matrix(self) -> int:
        """Bytes of weights among the reads, including repeated ones."""
        return sum(launch.matrix for launch in self.launches)

    @property
    def source(self) -> int:
        """Bytes of kernels' sources that the host hashes."""
        return sum(launch.source for launch in self.launches)

    @property
    def names(self) -> Counter[str]:
        return Counter(launch.name for launch in self.launches)

    def __add__(self, other: Ledger) -> Ledger:
        return Ledger(self.launches + other.launches, self.stages + other.stages)


def ledger(graph: Graph, gpu: Architecture = M4) -> Ledger:
    """The launches of a graph. Raises `UnknownPrimitiveError`."""
    known: dict[str, Laid] = {}
    launches: list[Launch] = []

    def find(names: Iterable[str]) -> list[Laid]:
        return [known.get(name) or Laid(shape, dtype, rows(shape)) for name in names for shape, dtype in [graph.shapes[name]]]

    for node in graph.nodes:
        rule = _RULES.get(node.name)
        if rule is None:
            raise UnknownPrimitiveError(f"MLX's primitive {node.name} has no rule: add one in benchmarks/launches/primitives.py")
        outputs = find(node.outputs)
        if any(a.size for a in outputs):
            ran, outputs = rule(node, find(node.inputs), outputs, gpu)
            launches += ran
        known.update(zip(node.outputs, outputs, strict=True))
    return Ledger(tuple(launches), max((launch.stage for launch in launches), default=0))


def total(graphs: Iterable[Graph], gpu: Architecture = M4) -> Ledger:
    """The launches of submissions that run one after another."""
    return sum((ledger(graph, gpu) for graph in graphs), Ledger((), 0))
