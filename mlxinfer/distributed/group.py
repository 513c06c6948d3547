"""Rank 0's view of the group: wait for the other ranks, agree on a plan, and detect a lost rank."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from threading import Event
from typing import TYPE_CHECKING, Any

from ..adapters.places import changes, of_part, of_share
from ..cache.base import AttentionSpec, LayerSpec, whole_spec
from ..config import EngineConfig
from ..errors import GroupLostError, NodesError, SettingError
from ..loading.memory.plan import usable_memory
from ..loading.memory.step import state_bytes
from ..loading.vision import vision_bytes
from ..models.decoder import Decoder, Model
from ..models.tensor_parallel import sum_results
from ..util.device import device_memory
from .agreement import Hello, Orders, RankLimits, log_line, model_digest, shared_settings
from .control_channel import SILENCE_S, ControlChannel, FrameKind, Heartbeat, listen
from .leader import Leader
from .nodes import Nodes
from .plan import SplitPlan, bytes_outside_blocks, cuttable, part_outline, plan_shares, plan_split
from .reception import HELLO_S, Reception
from .ring import Ring

if TYPE_CHECKING:
    from ..cache.kv_format import KVFormat
    from ..cache.paged import PagedCache
    from ..engine.open_model import PreparedModels
    from ..loading.load import PreparedModel

_RING_FAULT = "connection to a peer was lost"
"""Part of MLX's error if a neighbour is gone."""


class Group:
    """Implements `engine.open_model.OtherMachines`. The engine thread calls `share`, `limited` and `join`, in this order."""

    def __init__(self, nodes: Nodes, silence_s: float = SILENCE_S, split: str = "pipeline") -> None:
        """A rank counts as stalled after `silence_s` seconds without a heartbeat."""
        self.nodes = nodes
        self.plan: SplitPlan | None = None
        self.leader: Leader | None = None
        self.reason = ""
        """Reason for the loss of the group; "" while it runs."""
        self._known = Event()
        self._silence_s, self._split = silence_s, split
        self.read: list[dict[str, int]] = []
        """Bytes of the checkpoint that each further rank read, and bytes of its weights in memory."""
        self._loss_callbacks: list[Callable[[str], None]] = []
        self._channels: list[ControlChannel] = []
        self._heartbeat: Heartbeat | None = None
        self._ring: Ring | None = None
        self._limits: RankLimits | None = None

    def on_loss(self, told: Callable[[str], None]) -> None:
        """Call `told` with the reason, in a thread, once a rank has ended or stalled."""
        self._loss_callbacks.append(told)

    def reason_of(self, fault: str) -> str:
        """Return the reason for the loss of the group if it caused `fault`, an error of the ring; otherwise `fault`."""
        if _RING_FAULT in fault:
            self._known.wait(self._silence_s)
        return self.reason or fault

    def share(self, found: PreparedModels) -> PreparedModels:
        """Return rank 0's part, after all ranks have joined. Raises `NodesError` if one of them refuses the plan."""
        args, target = found.args, found.target
        if args.prefix_disk_gb:
            raise SettingError("prefix_disk_gb: what several machines have computed cannot be kept on disk yet: leave it out")
        if args.kv_producer or args.prefill_from:
            raise SettingError("kv_producer and prefill_from: pages of several machines cannot be handed out or fetched: leave them out")
        hello = Hello.mine(0, self.nodes.digest, model_digest(target.checkpoint.path), usable_memory(args.memory_gb))
        memory = self._gather(hello)
        outside_blocks = bytes_outside_blocks(target, found.draft)
        self.plan = plan = plan_as(self._split, target, found.kv, memory, outside_blocks)
        settings = shared_settings(args, str(target.dtype).rpartition(".")[2])
        orders = Orders(
            memory=memory,
            plan=plan.digest,
            split=self._split,
            settings=settings,
            adapters={a.name: a.digest for a in found.adapters},
            outside_blocks=outside_blocks,
            taps=list(target.model.mtp.taps) if target.model.mtp is not None else [],
            windows=head_windows(target.model),
        )
        self._send_all(FrameKind.PLAN, asdict(orders))
        own = own_part(found, plan, 0)
        mine = limits_of(own)
        self._limits = RankLimits.minimum([mine.as_json(), *(limits for limits in self._receive_all(FrameKind.LIMITS))])
        for line in plan.lines([self.nodes.label(rank) for rank in range(len(self.nodes))]):
            log_line(line)
        return own

    def limited(self, config: EngineConfig) -> EngineConfig:
        assert self._limits is not None
        return self._limits.limited(config)

    def join(self, model: Model) -> Callable[..., PagedCache]:
        assert isinstance(model, Decoder)
        assert self.plan is not None
        self.read = list(self._receive_all(FrameKind.LOADED))
        for rank, told in enumerate(self.read, 1):
            log_line(f"{self.nodes.label(rank)} has read {told['read'] / 1e6:.1f} MB")
        self._send_all(FrameKind.GO, {})
        self._ring = Ring()
        taps = model.mtp.taps if model.mtp is not None else ()
        elsewhere = sum(len(self.plan.taps(rank, taps)) for rank in range(1, len(self.nodes)))
        self.leader = leader = Leader(self._ring, self._send, self.plan.extra[0], elsewhere)
        self._heartbeat = Heartbeat(self._channels, self._on_loss, silence_s=self._silence_s)
        if self.plan.parts[0].shares > 1:
            sum_results(model, self._ring.sum)
            model.spread = leader.spread
        else:
            model.rest = leader.rest
        return leader.make_cache

    def close(self) -> None:
        """End the group on all ranks."""
        if self._heartbeat is not None:
            self._heartbeat.stop()
        for channel in self._channels:
            with suppress(OSError):
                channel.send(FrameKind.END)
            channel.close()

    @property
    def sent_bytes(self) -> int:
        """Bytes of messages and heartbeats sent to all other ranks."""
        return sum(channel.sent_bytes for channel in self._channels)

    @property
    def row_bytes(self) -> int:
        """Bytes of rows sent to the next rank."""
        return 0 if self._ring is None else self._ring.sent_bytes

    def _send(self, data: bytes) -> None:
        if self.reason:
            raise GroupLostError(self.reason)
        for channel in self._channels:
            with suppress(OSError):  # the heartbeat notices the loss
                channel.send(FrameKind.STEPS, data)

    def _on_loss(self, place: int, why: str) -> None:
        self.reason = f"{self.nodes.label(place + 1)} {why}"
        self._known.set()
        for told in self._loss_callbacks:
            told(self.reason)

    def _gather(self, mine: Hello) -> list[int]:
        """Wait for all ranks and return the bytes that each may take. A rank that does not match is refused with a reason."""
        address, port = self.nodes.control
        found: dict[int, tuple[ControlChannel, Hello]] = {}
        with listen(address, port, "rank 0 cannot wait for the others") as server:
            log_line(f"waiting for {', '.join(map(self.nodes.label, range(1, len(self.nodes))))} at {address}:{port}")
            reception = Reception(server)
            while len(found) < len(self.nodes) - 1:
                channel, hello = self._greet(*reception.next(), mine)
                if channel is not None and hello is not None:
                    if hello.rank in found:  # the rank's process was restarted
                        found[hello.rank][0].close()
                    found[hello.rank] = channel, hello
                    log_line(f"{self.nodes.label(hello.rank)} is there: {hello.device}, {hello.memory / 1e9:.3g} GB may be used")
            reception.close()
        self._channels = [found[rank][0] for rank in sorted(found)]
        return [mine.memory, *(found[rank][1].memory for rank in sorted(found))]

    def _greet(
        self, connection: socket.socket, told: dict[str, Any] | Exception, mine: Hello
    ) -> tuple[ControlChannel | None, Hello | None]:
        try:
            channel = ControlChannel(connection)
        except OSError:  # the client has disconnected
            connection.close()
            return None, None
        connection.settimeout(HELLO_S)  # after `ControlChannel`, which removes the timeout
        try:
            if isinstance(told, Exception):
                raise told
            hello = Hello.of(told)
            if not 0 < hello.rank < len(self.nodes):
                raise NodesError(f"rank {hello.rank} is not in rank 0's hostfile")
            mine.check(hello)
        except NodesError as error:
            log_line(f"refused: {error}")
            with suppress(OSError):
                channel.send(FrameKind.REFUSED, str(error).encode())
        except (OSError, TypeError, ValueError, RecursionError) as error:
            log_line(f"refused what is no rank of this version: {error}")
            with suppress(OSError):
                channel.send(FrameKind.REFUSED, b"this is no rank that rank 0 understands: install the same version of mlxinfer")
        else:
            connection.settimeout(None)
            return channel, hello
        channel.close()
        return None, None

    def _send_all(self, kind: FrameKind, value: dict[str, Any]) -> None:
        for rank, channel in enumerate(self._channels, 1):
            try:
                channel.send_json(kind, value)
            except OSError as error:
                raise GroupLostError(f"{self.nodes.label(rank)} has ended: {error}") from None

    def _receive_all(self, kind: FrameKind) -> Iterator[dict[str, int]]:
        for rank, channel in enumerate(self._channels, 1):
            try:
                yield channel.expect(kind)
            except NodesError as error:
                raise NodesError(f"{self.nodes.label(rank)}: {error}") from None
            except OSError as error:
                raise GroupLostError(f"{self.nodes.label(rank)} has ended: {error}") from None


def plan_as(split: str, target: PreparedModel, kv: KVFormat, memory: Sequence[int], outside_blocks: int) -> SplitPlan:
    """Plan by heads and columns if `split` is "tensor", otherwise by layers. Raises `MLXInferError`s."""
    return plan_shares(target, memory, outside_blocks) if split == "tensor" else plan_split(target, kv, memory, outside_blocks)


def head_windows(model: Model) -> list[int | None]:
    """Return the windows of the attention layers of the model's draft head."""
    layer = None if model.mtp is None else model.mtp.places.attention
    spec = None if layer is None else model.layers[layer]
    return [spec.window] if isinstance(spec, AttentionSpec) else []


def own_part(found: PreparedModels, plan: SplitPlan, rank: int) -> PreparedModels:
    """Return `found` reduced to one rank's part. Raises `AdapterError` for adapters that do not fit the whole model."""
    graph, part = cuttable(found.target), plan.parts[rank]
    outline: Model = part_outline(graph, part)
    if part.shares > 1:
        outline = found.target.outline(part)
    if found.adapters:
        changes(graph, found.adapters)
        own = of_part(outline, found.adapters) if part.shares == 1 else of_share(found.adapters, part)
        found = replace(found, adapters=own)
    # The plan counts the drafter and the tower among rank 0's weights.
    apart = (found.draft.weight_bytes if found.draft else 0) + (0 if rank else vision_bytes(found.target.vision))
    return replace(found, target=found.target.of_part(part, outline, plan.weights[rank] - apart))


def limits_of(own: PreparedModels) -> RankLimits:
    """Return this machine's limits. Raises `MemoryPlanError`."""
    graph = own.target.model
    pages = any(isinstance(spec, AttentionSpec) for spec in graph.layers)
    return RankLimits.of(own.plan(device_memory()), _snapshot_share(graph), pages=pages)


def _snapshot_share(graph: Model) -> float:
    """Return the approximate fraction of a snapshot's bytes that belongs to the layers of `graph`."""

    def size(spec: LayerSpec) -> int:
        return 64 * spec.kv_heads * (spec.key_dim + spec.value_dim) if isinstance(spec, AttentionSpec) else state_bytes(spec)

    own, whole = sum(map(size, graph.layers)), sum(map(size, map(whole_spec, graph.layers)))
    return own / whole if whole else 1.0
