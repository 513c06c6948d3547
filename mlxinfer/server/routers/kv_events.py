"""KV events in vLLM's format, for routers that send a prompt to the worker that has its prefix in the cache.

The format is msgpack over ZMQ, as in vLLM's `ZmqEventPublisher` (https://docs.vllm.ai, "KV Events Subscriber"). A PUB socket sends
`[topic, sequence number, batch]`. A ROUTER socket answers a sequence number with all stored batches from that number on.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from types import TracebackType

import msgspec
import zmq

from ...cache.kv_events import BlockRemoved, BlockStored, KVEvent
from ...cache.pages import PAGE
from ...errors import ServerError
from ...util.cache_dir import cache_dir

KEPT = 10_000
"""Batches stored for replay."""
_AT_ONCE = 1024
"""Maximum events in a batch."""
_LOOK_S = 0.1
"""Interval in seconds at which replay requests are checked while there are no events."""
_LONGEST_HEARD = 1024
"""Maximum bytes of a received message: a sequence number, or the topic of a subscription."""
_log = logging.getLogger(__name__)
_END = (-1).to_bytes(8, "big", signed=True)
"""Marks the end of a replay, instead of a sequence number."""

Queued = tuple[bytes, KVEvent]


class _Event(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    pass


class _BlockStored(_Event, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[list[str] | None] | None
    group_idx: int


class _BlockRemoved(_Event, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str
    group_idx: int


class _AllBlocksCleared(_Event, tag="AllBlocksCleared"):
    pass


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_BlockStored | _BlockRemoved | _AllBlocksCleared]
    data_parallel_rank: int = 0


class KVEventPublisher:
    """Publishes the events of all models of a server from a separate thread. The topic is the model's name."""

    def __init__(self, endpoint: str, replay_endpoint: str | None = None) -> None:
        """Open both sockets, such as `tcp://127.0.0.1:5557`. `ipc://` alone means `default_endpoint`. Raises `ServerError` if an
        endpoint cannot be opened, or if an address would let anybody read the tokens of prompts."""
        if endpoint == "ipc://":
            endpoint = default_endpoint("kv-events")
        if replay_endpoint == "ipc://":
            replay_endpoint = default_endpoint("kv-events-replay")
        self._context = zmq.Context()
        self._queue: SimpleQueue[Queued | None] = SimpleQueue()
        self._batches: deque[tuple[bytes, bytes, bytes]] = deque(maxlen=KEPT)
        self._number = 0
        self._pack = msgspec.msgpack.Encoder()
        try:
            self._publish = self._bound(zmq.PUB, endpoint)
            self._replay = self._bound(zmq.ROUTER, replay_endpoint) if replay_endpoint else None
        except ServerError:
            self._context.destroy(linger=0)
            raise
        self._thread = Thread(target=self._run, name="mlxinfer kv events", daemon=True)
        self._thread.start()

    def _bound(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        _check_address(endpoint)
        socket = self._context.socket(kind)
        socket.maxmsgsize = _LONGEST_HEARD
        if kind == zmq.ROUTER:
            socket.sndhwm = 2 * KEPT  # a ROUTER drops further messages; the default of 1000 is too few for one replay
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise ServerError(
                f"no KV events can be sent from {endpoint!r}: {error.strerror or error} (tcp://ADDRESS:PORT or ipc://PATH)"
            ) from error
        if endpoint.startswith("ipc:///"):
            Path(endpoint.removeprefix("ipc://")).chmod(0o600)
        return socket

    def put(self, topic: str, event: KVEvent) -> None:
        """Queue an event of the model with this name. Callable from any thread."""
        self._queue.put((topic.encode(), event))

    def close(self) -> None:
        """Publish all queued events, and close the sockets."""
        self._queue.put(None)
        self._thread.join()
        self._context.destroy(linger=0)

    def __enter__(self) -> KVEventPublisher:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _run(self) -> None:
        waiting: deque[Queued | None] = deque()
        while True:
            self._answer_replays()
            try:
                waiting.append(self._queue.get(timeout=_LOOK_S if self._replay else None))
                while len(waiting) < _AT_ONCE:
                    waiting.append(self._queue.get_nowait())
            except Empty:
                pass
            while waiting:
                first = waiting[0]
                if first is None:
                    return
                events = []
                while waiting and (head := waiting[0]) is not None and head[0] == first[0]:
                    events.append(head[1])
                    waiting.popleft()
                self._send(first[0], events)

    def _send(self, topic: bytes, events: list[KVEvent]) -> None:
        batch = topic, self._number.to_bytes(8, "big"), self._pack.encode(_Batch(time.time(), list(_merge_blocks(events))))
        self._number += 1
        self._batches.append(batch)
        self._publish.send_multipart(batch)

    def _answer_replays(self) -> None:
        if self._replay is not None and self._replay.poll(0):  # one at a time, so that replays do not delay events
            client, *_, first = self._replay.recv_multipart()
            if len(first) != len(_END):
                return
            answer = partial(self._replay.send_multipart, copy=False)
            for _, number, batch in self._batches:
                if int.from_bytes(number, "big") >= int.from_bytes(first, "big"):
                    answer((client, b"", number, batch))
            answer((client, b"", _END, b""))


def default_endpoint(name: str) -> str:
    """A socket in the cache directory that only this user can open."""
    folder = cache_dir()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return f"ipc://{folder / name}"


def _check_address(endpoint: str) -> None:
    """Raise `ServerError` for an endpoint on all addresses of the machine, and warn of an address that is not loopback."""
    kind, _, place = endpoint.partition("://")
    host = place.rpartition(":")[0].strip("[]")
    if kind != "tcp" or not host:
        return
    if host in ("*", "0.0.0.0", "::"):
        raise ServerError(
            f"KV events have the tokens of all prompts, and at {endpoint!r} whoever reaches this machine could read them: "
            "name one address, such as tcp://127.0.0.1:5557, or use ipc://"
        )
    try:
        loopback = ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if not loopback:
        _log.warning("KV events have the tokens of all prompts: whoever reaches %s can read them", endpoint)


def _merge_blocks(events: Iterable[KVEvent]) -> Iterable[_BlockStored | _BlockRemoved | _AllBlocksCleared]:
    """The events in vLLM's format. Consecutive pages of one prompt become one event."""
    last: _BlockStored | None = None
    for event in events:
        if isinstance(event, BlockStored):
            keys = [event.salt] if event.salt else None
            own = event.medium, event.group
            if last is not None and last.block_hashes[-1] == event.parent_block_hash and (last.medium, last.group_idx) == own:
                last.block_hashes.append(event.block_hash)
                last.token_ids.extend(event.token_ids)
                if last.extra_keys is not None:
                    last.extra_keys.append(keys)
                continue
            if last is not None:
                yield last
            salts: list[list[str] | None] | None = [keys] if keys else None
            hashes, tokens = [event.block_hash], list(event.token_ids)
            last = _BlockStored(hashes, event.parent_block_hash, tokens, PAGE, None, event.medium, None, salts, event.group)
            continue
        if last is not None:
            yield last
            last = None
        yield _BlockRemoved([event.block_hash], event.medium, event.group) if isinstance(event, BlockRemoved) else _AllBlocksCleared()
    if last is not None:
        yield last
