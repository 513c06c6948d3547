"""Process of every rank but 0: joins the group, reads its part of the model, and executes rank 0's steps."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from time import monotonic
from typing import NoReturn

from ..adapters.adapted_model import AdaptedModel
from ..engine.open_model import PreparedModels, prepare_models
from ..errors import ExpertReadError, GroupLostError, MLXInferError, NodesError
from ..loading.find.resolve import resolve
from ..loading.memory.plan import usable_memory
from ..loading.repack_cache.pooled_experts import PooledExperts
from ..models.decoder import BlockStack
from ..models.tensor_parallel import sum_results
from ..nn.packing import arrays
from ..util.device import clear_cache, device_memory
from .agreement import Hello, Orders, log_line, model_digest
from .control_channel import SILENCE_S, ControlChannel, FrameKind, Heartbeat
from .follower import Follower
from .group import limits_of, own_part, plan_as
from .nodes import Nodes
from .plan import SplitPlan
from .ring import Ring

_AGAIN_S = 0.2
"""Seconds between two attempts to connect to rank 0."""


def run_worker(
    path: str,
    nodes: Nodes,
    rank: int,
    memory_gb: float | None,
    ready: Callable[[], None],
    silence_s: float = SILENCE_S,
    adapters: Mapping[str, str | Path] | None = None,
) -> None:
    """Run until the group ends. `ready` is called once the group is joined; `adapters` are paths by name.

    Exits with `GroupLostError.exit_code` if rank 0 is lost. Raises `MLXInferError`s, including rank 0's.
    """
    mine = Hello.mine(rank, nodes.digest, model_digest(resolve(path).path), usable_memory(memory_gb))
    channel = _reach(nodes)
    channel.send_json(FrameKind.HELLO, {name: getattr(mine, name) for name in Hello.__dataclass_fields__})
    try:
        orders = Orders(**channel.expect(FrameKind.PLAN))
        try:
            stack, adapted, plan, found, experts = _load(path, orders, rank, mine.memory, channel, adapters)
        except MLXInferError as error:
            channel.send(FrameKind.REFUSED, str(error).encode())
            raise
        channel.expect(FrameKind.GO)
    except OSError:
        _leave("rank 0 has ended")
    ring = Ring()
    if orders.split == "tensor":
        sum_results(stack, ring.sum)
        if adapted is not None:
            assert isinstance(adapted.adapted, BlockStack)
            sum_results(adapted.adapted, ring.sum)
    ready()
    received: SimpleQueue[tuple[FrameKind, bytes]] = SimpleQueue()
    heartbeat = Heartbeat([channel], lambda _, why: _leave(f"rank 0 {why}"), lambda kind, payload: received.put((kind, payload)), silence_s)
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
        experts=experts,
    )
    while True:
        kind, payload = received.get()
        if kind is FrameKind.END:
            heartbeat.stop()
            channel.close()
            return
        try:
            follower.take(payload)
        except ExpertReadError as error:
            _leave(str(error))


def _load(
    path: str, orders: Orders, rank: int, memory: int, channel: ControlChannel, adapters: Mapping[str, str | Path] | None
) -> tuple[BlockStack, AdaptedModel | None, SplitPlan, PreparedModels, PooledExperts | None]:
    with prepare_models(orders.args(path, memory / 1e9, adapters)) as found:
        plan = plan_as(orders.split, found.target, found.kv, orders.memory, orders.outside_blocks)
        if plan.digest != orders.plan:
            raise NodesError(f"rank {rank} comes to another plan than rank 0: start both from the same files and versions")
        if {a.name: a.digest for a in found.adapters} != orders.adapters:
            raise NodesError(f"rank {rank} has other adapters than rank 0: copy rank 0's")
        own, part = own_part(found, plan, rank), plan.parts[rank]
        limits = limits_of(own)
        channel.send_json(FrameKind.LIMITS, limits.as_json())
        pools = own.plan(device_memory()).experts
        experts = None if pools is None else own.target.open_experts(pools.pools, None)
        stack, read = own.target.read_blocks(part, experts)
        if orders.split == "pipeline":
            stack.tap(plan.taps(rank, orders.taps), found.target.dtype)
        adapted = AdaptedModel(stack, own.adapters, found.target.dtype) if own.adapters else None
    clear_cache()
    held = sum(array.nbytes for array in arrays(stack))
    log_line(f"blocks {part.first} to {part.last - 1}: read {read / 1e6:.1f} MB, which take {held / 1e6:.1f} MB")
    channel.send_json(FrameKind.LOADED, {"read": read, "held": held})
    return stack, adapted, plan, found, experts


def _reach(nodes: Nodes) -> ControlChannel:
    """Connect to rank 0, waiting until it listens."""
    address, port = nodes.control
    began, said = monotonic(), False
    while True:
        with suppress(OSError):
            return ControlChannel.connect((address, port), 5.0)
        if not said and monotonic() - began > 5:
            said = True
            log_line(f"waiting for rank 0 at {address}:{port}")
        Event().wait(_AGAIN_S)


def _leave(why: str) -> NoReturn:
    """Exit at once: an operation that waits for another rank cannot be interrupted."""
    log_line(f"the group is lost: {why}")
    os._exit(GroupLostError.exit_code)
