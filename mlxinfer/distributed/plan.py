"""Assigns blocks to ranks by the checkpoint's headers and each machine's memory, before weights are read."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Sequence
from functools import cache

from ..cache.base import BidirectionalSpec
from ..cache.kv_format import KVFormat
from ..cache.paged import PagedCache
from ..errors import NodesError, UnsupportedModelError
from ..loading.load import PreparedModel
from ..loading.memory.plan import GOOD_CONTEXT
from ..loading.vision import vision_bytes
from ..models.decoder import Decoder
from ..models.pipeline_stage import Stage, layers_of, only
from ..util.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """Consecutive blocks for each rank. Rank 0 also has the embedding and the head."""

    parts: tuple[Stage, ...]
    """By rank."""
    weights: tuple[int, ...]
    """Bytes of weights, by rank."""
    memory: tuple[int, ...]
    """Bytes that each rank may take."""
    extra: tuple[int, ...]
    """Columns that rank r sends after the hidden ones: inputs of later ranks' blocks. 0 for most families."""

    def taps(self, rank: int, taps: Sequence[int]) -> list[int]:
        """Return the whole model's `taps` that fall into this rank's blocks, counted from its first block."""
        part = self.parts[rank]
        return [tap - part.first for tap in taps if part.first <= tap < part.last]

    @property
    def digest(self) -> str:
        """Hash; equal for equal plans."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

    def lines(self, label: Sequence[str]) -> Iterator[str]:
        """Yield one line per rank, for people; `label` has the names of the ranks."""
        for name, part, weights, memory in zip(label, self.parts, self.weights, self.memory, strict=True):
            ends = ", embedding and head" if part.first == part.share == 0 else ""
            ends = f", one share of {part.shares}{ends}" if part.shares > 1 else ends
            sizes = f"{weights / 1e9:.3g} GB of weights, {memory / 1e9:.3g} GB may be used"
            yield f"{name}: blocks {part.first} to {part.last - 1}{ends}, {sizes}"


def bytes_outside_blocks(found: PreparedModel, draft: PreparedModel | None = None) -> int:
    """Return the bytes of rank 0's weights outside the blocks, with those of a vision tower and a draft model."""
    return found.weight_bytes - sum(found.block_bytes) + vision_bytes(found.vision) + (draft.weight_bytes if draft else 0)


def plan_split(found: PreparedModel, kv: KVFormat, memory: Sequence[int], outside_blocks: int | None = None) -> SplitPlan:
    """Divide the blocks so that the fullest machine has as much free memory as possible, with `GOOD_CONTEXT` tokens of context.

    `outside_blocks` are the bytes of rank 0's weights outside the blocks; by default the model's own, without a drafter. Raises
    `NodesError` for too many machines or too little memory, and `UnsupportedModelError` for a model that cannot be divided.
    """
    graph = cuttable(found)
    first = bytes_outside_blocks(found) if outside_blocks is None else outside_blocks
    pages = [_context_bytes(graph, block, kv, found) for block in graph.blocks]
    costs = [weights + page for weights, page in zip(found.block_bytes, pages, strict=True)]
    # Image rows get more rows after the first blocks, which only rank 0 has.
    added = 0 if isinstance(found.vision, str) else found.vision.tower.added_layers
    allowed = [can and at >= added for at, can in enumerate(allowed_cuts(graph))]
    cuts = best_cuts(costs, first, memory, allowed)
    parts = tuple(Stage(cuts[rank], cuts[rank + 1]) for rank in range(len(memory)))
    weights = [sum(found.block_bytes[part.first : part.last]) for part in parts]
    weights[0] += first
    width = 0 if graph.inputs is None else graph.inputs.width
    extra = tuple(width * (len(graph.blocks) - part.last) for part in parts)
    return SplitPlan(parts, tuple(weights), tuple(memory), extra)


def plan_shares(found: PreparedModel, memory: Sequence[int], outside_blocks: int | None = None) -> SplitPlan:
    """Give each rank an equal share of every block; `outside_blocks` as in `plan_split`.

    Raises `NodesError` if a machine has too little memory, and `UnsupportedModelError` for a model that cannot be divided so.
    """
    ranks, blocks = len(memory), len(found.block_bytes)
    cuttable(found)
    parts = tuple(Stage(0, blocks, rank, ranks) for rank in range(ranks))
    found.outline(parts[0])
    share = -(-sum(found.block_bytes) // ranks)
    weights = (share + (bytes_outside_blocks(found) if outside_blocks is None else outside_blocks), *[share] * (ranks - 1))
    for rank, (size, room) in enumerate(zip(weights, memory, strict=True)):
        if size > room:
            raise NodesError(f"rank {rank} has {room / 1e9:.3g} GB, and its share of the weights takes {size / 1e9:.3g} GB")
    return SplitPlan(parts, weights, tuple(memory), (0,) * ranks)


def cuttable(found: PreparedModel) -> Decoder:
    """Return the graph of a model that can run on several machines. Raises `UnsupportedModelError`."""
    if found.borrowed or not isinstance(found.model, Decoder):
        raise UnsupportedModelError(f"{found.model_type} runs on mlx-lm's graph, which cannot be divided among machines: run it on one")
    if any(isinstance(spec, BidirectionalSpec) for spec in found.model.layers):
        raise UnsupportedModelError(f"{found.model_type} makes vectors only, and has no need of several machines: run it on one")
    head = found.model.mtp
    if head is not None and head.reads:
        raise UnsupportedModelError(
            f"the model that drafts for {found.model_type} reads pages of its last layers, which other machines have: leave out --draft"
        )
    return found.model


def part_outline(graph: Decoder, part: Stage) -> Decoder:
    """Return a rank's part of the graph without values, to plan its memory."""
    twin = copy.copy(graph)
    twin.part, twin.blocks = part, graph.blocks[part.first : part.last]
    own = layers_of(twin.blocks)
    if graph.mtp is not None and part.first == 0:
        own |= {layer for layer in (graph.mtp.places.attention, graph.mtp.places.state) if layer is not None}
    twin.layers = only(graph.layers, own)
    return twin


def allowed_cuts(graph: Decoder) -> list[bool]:
    """For each block, True if the model can be cut before it: no later block reads pages that an earlier one writes."""
    used = [layers_of([block]) for block in graph.blocks]
    return [not set().union(*used[:at]) & set().union(*used[at:]) for at in range(len(used))]


def best_cuts(costs: Sequence[int], first: int, memory: Sequence[int], allowed: Sequence[bool]) -> list[int]:
    """Return the first block of each rank, and the number of blocks, so that the largest used fraction of any rank's memory is minimal.

    `first` are the bytes of rank 0's weights outside the blocks. Raises `NodesError`.
    """
    count, ranks = len(costs), len(memory)
    sums = [0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    @cache
    def best(rank: int, begin: int) -> tuple[float, int]:
        """Return the smallest such fraction for the ranks from `rank` on, and the end of this rank's blocks."""
        own = first if rank == 0 else 0
        if rank == ranks - 1:
            return (own + sums[count] - sums[begin]) / memory[rank], count
        ends = [end for end in range(begin + 1, count - (ranks - rank - 2)) if allowed[end]]
        found = [(max((own + sums[end] - sums[begin]) / memory[rank], best(rank + 1, end)[0]), end) for end in ends]
        return min(found, default=(float("inf"), count))

    part, _ = best(0, 0)
    if part == float("inf"):
        raise NodesError(f"the model has {count} blocks and can be cut at {sum(allowed[1:])} places: too few for {ranks} machines")
    if part > 1:
        raise NodesError(
            f"not enough memory on {ranks} machines: the model and a context need {(first + sums[count]) / 1e9:.3g} GB, and they have "
            f"{sum(memory) / 1e9:.3g} GB together: add a machine, or use a more quantized model"
        )
    cuts = [0]
    for rank in range(ranks):
        cuts.append(best(rank, cuts[-1])[1])
    return cuts


def _context_bytes(graph: Decoder, block: object, kv: KVFormat, found: PreparedModel) -> int:
    specs = [graph.layers[layer] for layer in layers_of([block])]
    tokens = min(GOOD_CONTEXT, graph.max_context)
    return int(PagedCache.token_bytes(specs, found.dtype, kv) * tokens) + PagedCache.sequence_bytes(specs, found.dtype, kv)
