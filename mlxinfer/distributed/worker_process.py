"""The process of every rank but 0: it joins the group, reads its part of the model, and computes what it is told."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from time import monotonic
from typing import NoReturn

import mlx.core as mx

from ..adapters.adapted_model import AdaptedModel
from ..engine.open_model import Prepared, prepared
from ..errors import GroupLostError, MLXInferError, NodesError
from ..loading.find.resolve import resolve
from ..loading.memory.plan import usable_memory
from ..models.decoder import BlockStack
from ..models.tensor_parallel import sum_results
from ..nn.packing import arrays
from .agreement import Hello, Orders, model_digest, say
from .control_channel import SILENCE_S, Kind, Link, Pulse
from .follower import Follower
from .group import limits_of, own_part, plan_as
from .nodes import Nodes
from .plan import SplitPlan
from .ring import Ring

_AGAIN_S = 0.2
"""Seconds between two attempts to reach rank 0."""


def run_member(
    path: str,
    nodes: Nodes,
    rank: int,
    memory_gb: float | None,
    ready: Callable[[], None],
    silence_s: float = SILENCE_S,
    adapters: Mapping[str, str | Path] | None = None,
) -> None:
    """Until the group ends. `ready` is called when it is joined; `adapters` are paths by name. Ends the process with
    `GroupLostError.exit_code` where rank 0 is lost. Raises `MLXInferError`s, those of rank 0 too."""
    mine = Hello.mine(rank, nodes.digest, model_digest(resolve(path).path), usable_memory(memory_gb))
    link = _reach(nodes)
    link.tell(Kind.HELLO, {name: getattr(mine, name) for name in Hello.__dataclass_fields__})
    try:
        orders = Orders(**link.expect(Kind.PLAN))
        try:
            stack, adapted, plan, found = _load(path, orders, rank, mine.memory, link, adapters)
        except MLXInferError as error:
            link.send(Kind.REFUSED, str(error).encode())
            raise
        link.expect(Kind.GO)
    except OSError:
        _leave("rank 0 has ended")
    ring = Ring()
    if orders.split == "tensor":
        sum_results(stack, ring.sum)
        if adapted is not None:
            assert isinstance(adapted.adapted, BlockStack)
            sum_results(adapted.adapted, ring.sum)
    ready()
    received: SimpleQueue[tuple[Kind, bytes]] = SimpleQueue()
    pulse = Pulse([link], lambda _, why: _leave(f"rank 0 {why}"), lambda kind, payload: received.put((kind, payload)), silence_s)
    before, after = plan.extra[rank - 1], plan.extra[rank]
    tapped = sum(len(plan.taps(other, orders.taps)) for other in range(1, rank)) if orders.split == "pipeline" else 0
    follower = Follower(
        stack,
        ring,
        found.target.dtype,
        found.kv,
        before=before,
        after=after,
        tapped=tapped,
        adapted=adapted,
        windows=orders.windows,
    )
    while True:
        kind, payload = received.get()
        if kind is Kind.END:
            pulse.stop()
            link.close()
            return
        follower.take(payload)


def _load(
    path: str, orders: Orders, rank: int, memory: int, link: Link, adapters: Mapping[str, str | Path] | None
) -> tuple[BlockStack, AdaptedModel | None, SplitPlan, Prepared]:
    with prepared(orders.args(path, memory / 1e9, adapters)) as found:
        plan = plan_as(orders.split, found.target, found.kv, orders.memory, orders.besides)
        if plan.digest != orders.plan:
            raise NodesError(f"rank {rank} comes to another plan than rank 0: start both from the same files and versions")
        if {a.name: a.digest for a in found.adapters} != orders.adapters:
            raise NodesError(f"rank {rank} has other adapters than rank 0: copy rank 0's")
        own, part = own_part(found, plan, rank), plan.parts[rank]
        limits = limits_of(own)
        link.tell(Kind.LIMITS, limits.told())
        assert found.target.read_blocks is not None
        stack, read = found.target.read_blocks(part)
        if orders.split == "pipeline":
            stack.tap(plan.taps(rank, orders.taps), found.target.dtype)
        adapted = AdaptedModel(stack, own.adapters, found.target.dtype) if own.adapters else None
    mx.clear_cache()
    held = sum(array.nbytes for array in arrays(stack))
    say(f"blocks {part.first} to {part.last - 1}: read {read / 1e6:.1f} MB, which take {held / 1e6:.1f} MB")
    link.tell(Kind.LOADED, {"read": read, "held": held})
    return stack, adapted, plan, found


def _reach(nodes: Nodes) -> Link:
    """Wait until rank 0 is there."""
    address, port = nodes.control
    began, said = monotonic(), False
    while True:
        with suppress(OSError):
            return Link.connect((address, port), 5.0)
        if not said and monotonic() - began > 5:
            said = True
            say(f"waiting for rank 0 at {address}:{port}")
        Event().wait(_AGAIN_S)


def _leave(why: str) -> NoReturn:
    """End at once: an operation that waits for another rank cannot be interrupted."""
    say(f"the group is lost: {why}")
    os._exit(GroupLostError.exit_code)
