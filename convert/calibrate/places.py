"""Places in a part of a model that multiply, with the tensors of each."""

from __future__ import annotations

from collections.abc import Iterator

from ...nn.linear import JoinedLinear, Linear
from ...nn.packing import objects


def places_of(part: object) -> Iterator[list[Linear]]:
    """The products of a part that read the same input, together: each place once, in an order that depends on the graph alone."""
    seen: set[int] = set()
    for node in objects(part):
        if isinstance(node, JoinedLinear):
            seen.update(map(id, node.linears))
            yield list(node.linears)
        elif isinstance(node, Linear) and id(node) not in seen:
            yield [node]


def tensors_of(linear: Linear) -> list[str]:
    """The tensors whose rows a product has, in the order of the first of them, as the graph calls them. None that cannot be quantized."""
    return list(dict.fromkeys(f"{projection.name}.weight" for projection in linear.projections))
