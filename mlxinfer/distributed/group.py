"""The group as rank 0 sees it: it waits for the others, agrees on a plan with them, and hears when one of them is lost."""

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
from ..models.decoder import Decoder, Model
from ..models.tensor_parallel import sum_results
from ..util.device import device_memory
from .agreement import Hello, Limits, Orders, model_digest, say, shared_settings
from .control_channel import SILENCE_S, Kind, Link, Pulse, listen
from .leader import Lead
from .nodes import Nodes
from .plan import SplitPlan, bytes_besides, cuttable, part_outline, plan_shares, plan_split
from .reception import HELLO_S, Reception
from .ring import Ring

if TYPE_CHECKING:
    from ..cache.kv_format import KVFormat
    from ..cache.paged import PagedCache
    from ..engine.open_model import Prepared
    from ..loading.load import PreparedModel

_RING_FAULT = "connection to a peer was lost"
"""What MLX says where a neighbour has gone."""


class Group:
    """Implements `engine.open_model.OtherMachines`. `share`, `limited` and `join` are called in this order, in the engine's thread."""

    def __init__(self, nodes: Nodes, silence_s: float = SILENCE_S, split: str = "pipeline") -> None:
        """After `silence_s` seconds without a sign of life a rank counts as stalled."""
        self.nodes = nodes
        self.plan: SplitPlan | None = None
        self.lead: Lead | None = None
        self.reason = ""
        """Why the group is lost; empty as long as it is not."""
        self._known = Event()
        self._silence_s, self._split = silence_s, split
        self.read: list[dict[str, int]] = []
        """What each further rank has read of the checkpoint, and what it holds, in bytes."""
        self._told: list[Callable[[str], None]] = []
        self._links: list[Link] = []
        self._pulse: Pulse | None = None
        self._ring: Ring | None = None
        self._limits: Limits | None = None

    def on_loss(self, told: Callable[[str], None]) -> None:
        """Have `told` called with the reason, in a thread, once a rank has ended or stalled."""
        self._told.append(told)

    def reason_of(self, fault: str) -> str:
        """Why the group is lost, if that is behind this fault of the ring; otherwise the fault itself."""
        if _RING_FAULT in fault:
            self._known.wait(self._silence_s)
        return self.reason or fault

    def share(self, found: Prepared) -> Prepared:
        """Rank 0's part. Waits until all others are there; raises `NodesError` where one of them refuses the plan."""
        args, target = found.args, found.target
        if args.prefix_disk_gb:
            raise SettingError("prefix_disk_gb: what several machines have computed cannot be kept on disk yet: leave it out")
        if args.kv_producer or args.prefill_from:
            raise SettingError("kv_producer and prefill_from: pages of several machines cannot be handed out or fetched: leave them out")
        hello = Hello.mine(0, self.nodes.digest, model_digest(target.checkpoint.path), usable_memory(args.memory_gb))
        memory = self._gather(hello)
        besides = bytes_besides(target, found.draft)
        self.plan = plan = plan_as(self._split, target, found.kv, memory, besides)
        settings = shared_settings(args, str(target.dtype).rpartition(".")[2])
        orders = Orders(
            memory=memory,
            plan=plan.digest,
            split=self._split,
            settings=settings,
            adapters={a.name: a.digest for a in found.adapters},
            besides=besides,
            taps=list(target.model.mtp.taps) if target.model.mtp is not None else [],
            windows=head_windows(target.model),
        )
        self._tell_all(Kind.PLAN, asdict(orders))
        own = own_part(found, plan, 0)
        mine = limits_of(own)
        self._limits = Limits.least([mine.told(), *(limits for limits in self._hear(Kind.LIMITS))])
        for line in plan.lines([self.nodes.label(rank) for rank in range(len(self.nodes))]):
            say(line)
        return own

    def limited(self, config: EngineConfig) -> EngineConfig:
        assert self._limits is not None
        return self._limits.limited(config)

    def join(self, model: Model) -> Callable[..., PagedCache]:
        assert isinstance(model, Decoder)
        assert self.plan is not None
        self.read = list(self._hear(Kind.LOADED))
        for rank, told in enumerate(self.read, 1):
            say(f"{self.nodes.label(rank)} has read {told['read'] / 1e6:.1f} MB")
        self._tell_all(Kind.GO, {})
        self._ring = Ring()
        taps = model.mtp.taps if model.mtp is not None else ()
        elsewhere = sum(len(self.plan.taps(rank, taps)) for rank in range(1, len(self.nodes)))
        self.lead = lead = Lead(self._ring, self._send, self.plan.extra[0], elsewhere)
        self._pulse = Pulse(self._links, self._on_loss, silence_s=self._silence_s)
        if self.plan.parts[0].shares > 1:
            sum_results(model, self._ring.sum)
            model.spread = lead.spread
        else:
            model.rest = lead.rest
        return lead.make_cache

    def close(self) -> None:
        """Let the others end."""
        if self._pulse is not None:
            self._pulse.stop()
        for link in self._links:
            with suppress(OSError):
                link.send(Kind.END)
            link.close()

    @property
    def sent_bytes(self) -> int:
        """Bytes of layouts and signs of life that rank 0 has sent to all others."""
        return sum(link.sent_bytes for link in self._links)

    @property
    def row_bytes(self) -> int:
        """Bytes of rows that rank 0 has sent to the next one."""
        return 0 if self._ring is None else self._ring.sent_bytes

    def _send(self, data: bytes) -> None:
        if self.reason:
            raise GroupLostError(self.reason)
        for link in self._links:
            with suppress(OSError):  # the pulse hears of it
                link.send(Kind.STEPS, data)

    def _on_loss(self, place: int, why: str) -> None:
        self.reason = f"{self.nodes.label(place + 1)} {why}"
        self._known.set()
        for told in self._told:
            told(self.reason)

    def _gather(self, mine: Hello) -> list[int]:
        """Wait for all others. Returns what each rank may take, in bytes. One that does not fit is told so in a line, and goes."""
        address, port = self.nodes.control
        found: dict[int, tuple[Link, Hello]] = {}
        with listen(address, port, "rank 0 cannot wait for the others") as server:
            say(f"waiting for {', '.join(map(self.nodes.label, range(1, len(self.nodes))))} at {address}:{port}")
            reception = Reception(server)
            while len(found) < len(self.nodes) - 1:
                link, hello = self._greet(*reception.next(), mine)
                if link is not None and hello is not None:
                    if hello.rank in found:  # its process has been started again
                        found[hello.rank][0].close()
                    found[hello.rank] = link, hello
                    say(f"{self.nodes.label(hello.rank)} is there: {hello.device}, {hello.memory / 1e9:.3g} GB may be used")
            reception.close()
        self._links = [found[rank][0] for rank in sorted(found)]
        return [mine.memory, *(found[rank][1].memory for rank in sorted(found))]

    def _greet(self, connection: socket.socket, told: dict[str, Any] | Exception, mine: Hello) -> tuple[Link | None, Hello | None]:
        try:
            link = Link(connection)
        except OSError:  # it has left
            connection.close()
            return None, None
        connection.settimeout(HELLO_S)  # after `Link`, which waits without end
        try:
            if isinstance(told, Exception):
                raise told
            hello = Hello.of(told)
            if not 0 < hello.rank < len(self.nodes):
                raise NodesError(f"rank {hello.rank} is not in rank 0's hostfile")
            mine.check(hello)
        except NodesError as error:
            say(f"refused: {error}")
            with suppress(OSError):
                link.send(Kind.REFUSED, str(error).encode())
        except (OSError, TypeError, ValueError, RecursionError) as error:
            say(f"refused what is no rank of this version: {error}")
            with suppress(OSError):
                link.send(Kind.REFUSED, b"this is no rank that rank 0 understands: install the same version of mlxinfer")
        else:
            connection.settimeout(None)
            return link, hello
        link.close()
        return None, None

    def _tell_all(self, kind: Kind, value: dict[str, Any]) -> None:
        for rank, link in enumerate(self._links, 1):
            try:
                link.tell(kind, value)
            except OSError as error:
                raise GroupLostError(f"{self.nodes.label(rank)} has ended: {error}") from None

    def _hear(self, kind: Kind) -> Iterator[dict[str, int]]:
        for rank, link in enumerate(self._links, 1):
            try:
                yield link.expect(kind)
            except NodesError as error:
                raise NodesError(f"{self.nodes.label(rank)}: {error}") from None
            except OSError as error:
                raise GroupLostError(f"{self.nodes.label(rank)} has ended: {error}") from None


def plan_as(split: str, target: PreparedModel, kv: KVFormat, memory: Sequence[int], besides: int) -> SplitPlan:
    """By layers, or by heads and columns where `split` is "tensor". Raises `MLXInferError`s."""
    return plan_shares(target, memory, besides) if split == "tensor" else plan_split(target, kv, memory, besides)


def head_windows(model: Model) -> list[int | None]:
    """Windows of the attention layers of a head that the model has."""
    layer = None if model.mtp is None else model.mtp.places.attention
    spec = None if layer is None else model.layers[layer]
    return [spec.window] if isinstance(spec, AttentionSpec) else []


def own_part(found: Prepared, plan: SplitPlan, rank: int) -> Prepared:
    """The same with the part of one rank only. Raises `AdapterError` for adapters that do not fit the whole."""
    graph, part = cuttable(found.target), plan.parts[rank]
    outline: Model = part_outline(graph, part)
    if part.shares > 1:
        assert found.target.outline is not None
        outline = found.target.outline(part)
    if found.adapters:
        changes(graph, found.adapters)
        own = of_part(outline, found.adapters) if part.shares == 1 else of_share(found.adapters, part)
        found = replace(found, adapters=own)
    drafting = found.draft.weight_bytes if found.draft else 0  # among rank 0's in the plan
    return replace(found, target=replace(found.target, model=outline, weight_bytes=plan.weights[rank] - drafting, part=part))


def limits_of(own: Prepared) -> Limits:
    """What this machine has room for. Raises `MemoryPlanError`."""
    graph = own.target.model
    pages = any(isinstance(spec, AttentionSpec) for spec in graph.layers)
    return Limits.of(own.plan(device_memory()), _snapshot_share(graph), pages=pages)


def _snapshot_share(graph: Model) -> float:
    """Share of a snapshot's bytes that the own layers of a graph make up, about."""

    def size(spec: LayerSpec) -> int:
        return 64 * spec.kv_heads * (spec.key_dim + spec.value_dim) if isinstance(spec, AttentionSpec) else state_bytes(spec)

    own, whole = sum(map(size, graph.layers)), sum(map(size, map(whole_spec, graph.layers)))
    return own / whole if whole else 1.0
