"""KV events at the receiver, decoded with the types of vLLM's example subscriber."""

from __future__ import annotations

import os
import stat
from functools import partial
from pathlib import Path
from typing import Any

import pytest

msgspec = pytest.importorskip("msgspec")
zmq = pytest.importorskip("zmq")
from mlxinfer.cache.kv_events import DISK, GPU, AllBlocksCleared, BlockRemoved, BlockStored  # noqa: E402
from mlxinfer.errors import ServerError  # noqa: E402
from mlxinfer.server.routers import kv_events  # noqa: E402
from mlxinfer.server.routers.kv_events import KVEventPublisher  # noqa: E402


class Event(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    pass


class Stored(Event, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None


class Removed(Event, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class Cleared(Event, tag="AllBlocksCleared"):
    pass


class Batch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[Stored | Removed | Cleared]
    data_parallel_rank: int | None = None


DECODER = msgspec.msgpack.Decoder(Batch)


def page(own, parent=None, medium=GPU, group=0, salt=""):
    return BlockStored(own, parent, tuple(range(own * 64, own * 64 + 64)), medium, group, salt)


@pytest.fixture
def endpoints(short_path):
    """Paths instead of ports, which may be taken."""
    return f"ipc://{short_path}/events", f"ipc://{short_path}/replay"


@pytest.fixture
def context():
    with zmq.Context() as made:
        yield made


def test_what_a_subscriber_reads(endpoints, context):
    with KVEventPublisher(*endpoints) as publisher, context.socket(zmq.SUB) as subscriber:
        subscriber.connect(endpoints[0])
        subscriber.subscribe(b"tiny")
        while not subscriber.poll(50):  # until the subscription has arrived
            publisher.put("tiny", AllBlocksCleared())
        put = partial(publisher.put, "tiny")
        put(page(1))
        put(page(2, 1))
        put(page(3, 2, salt="ab"))
        put(BlockRemoved(2, GPU, 0))
        put(page(7, 1, DISK, 1))
        publisher.put("other", page(9))
        put(AllBlocksCleared())
        events, numbers = [], []
        while not (events and isinstance(events[-1], Cleared) and len(events) > 4):
            assert subscriber.poll(30_000)
            topic, number, payload = subscriber.recv_multipart()
            assert topic == b"tiny"
            numbers.append(int.from_bytes(number, "big"))
            batch = DECODER.decode(payload)
            assert batch.data_parallel_rank == 0
            events += batch.events
    assert numbers == sorted(set(numbers))
    events = [event for event in events if not isinstance(event, Cleared)]
    stored = [event for event in events if isinstance(event, Stored)]
    assert [number for event in stored for number in event.block_hashes] == [1, 2, 3, 7]
    assert all(len(event.token_ids) == 64 * len(event.block_hashes) and event.block_size == 64 for event in stored)
    assert (stored[-1].medium, stored[-1].group_idx, stored[-1].parent_block_hash) == (DISK, 1, 1)
    assert [event.block_hashes for event in events if isinstance(event, Removed)] == [[2]]


def test_what_was_missed_can_be_asked_for(endpoints, context):
    with KVEventPublisher(*endpoints) as publisher:
        for number in range(1, 6):
            publisher.put(f"model {number}", page(number))  # separate batches
        with context.socket(zmq.DEALER) as ask:
            ask.connect(endpoints[1])
            found = []
            while len(found) < 4:
                found = []
                ask.send_multipart([b"", (1).to_bytes(8, "big")])
                while True:
                    assert ask.poll(30_000)
                    _, number, payload = ask.recv_multipart()
                    if int.from_bytes(number, "big", signed=True) < 0:
                        break
                    found.append((int.from_bytes(number, "big"), DECODER.decode(payload).events[0].block_hashes))
    assert found == [(1, [2]), (2, [3]), (3, [4]), (4, [5])]


def test_an_address_that_cannot_be_had(endpoints):
    with KVEventPublisher(endpoints[0]):
        with pytest.raises(ServerError, match="no KV events can be sent from 'tcp://nowhere"):
            KVEventPublisher("tcp://nowhere.invalid:1")
        with pytest.raises(ServerError, match="tcp://ADDRESS:PORT"):
            KVEventPublisher("5557")


def test_addresses_of_everybody_are_refused_and_others_warned_of(caplog, endpoints):
    for endpoint in ("tcp://*:0", "tcp://0.0.0.0:5557", "tcp://[::]:5557"):
        with pytest.raises(ServerError, match=r"the tokens of all prompts.* tcp://127\.0\.0\.1:5557, or use ipc://"):
            KVEventPublisher(endpoint)
        with pytest.raises(ServerError, match="the tokens of all prompts"):
            KVEventPublisher(endpoints[0], endpoint)
    with pytest.raises(ServerError, match="no KV events can be sent"):  # an address reserved for documentation
        KVEventPublisher("tcp://203.0.113.1:5557")
    assert "whoever reaches tcp://203.0.113.1:5557 can read them" in caplog.text


def test_the_default_socket_is_its_user_s_only(short_path, monkeypatch):
    monkeypatch.setattr(kv_events, "cache_dir", lambda: short_path / "cache")
    before = os.umask(0)
    try:
        with KVEventPublisher("ipc://", "ipc://"):
            modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (short_path / "cache").iterdir()}
    finally:
        os.umask(before)
    assert modes == {"kv-events": 0o600, "kv-events-replay": 0o600}
    assert stat.S_IMODE((short_path / "cache").stat().st_mode) == 0o700


def test_odd_questions_keep_no_events_waiting(endpoints, context):
    """A sequence number of a megabyte ends the connection instead of being compared with 10,000 batches."""
    with KVEventPublisher(*endpoints) as publisher, context.socket(zmq.DEALER) as ask:
        for number in range(2000):
            publisher.put(f"model {number}", page(number))
        for odd in ([b""], [b"", b""], [b"", b"x" * 9], [b"", b"1", b"2", b"3"]):
            ask.connect(endpoints[1])
            ask.send_multipart(odd)
        with context.socket(zmq.DEALER) as long:
            long.connect(endpoints[1])
            long.send_multipart([b"", b"\xff" * 1_000_000])
            assert not long.poll(100)
        ask.send_multipart([b"", (1998).to_bytes(8, "big")])
        numbers = []
        while not numbers or numbers[-1] != -1:
            assert ask.poll(30_000)
            numbers.append(int.from_bytes(ask.recv_multipart()[1], "big", signed=True))
    assert numbers[-1] == -1
    assert len(numbers) <= 3


def test_a_replay_of_more_than_a_socket_holds_by_default(short_path: Path) -> None:
    count, endpoint = 4000, f"ipc://{short_path}/replay"
    with zmq.Context() as context, context.socket(zmq.DEALER) as ask, KVEventPublisher(f"ipc://{short_path}/events", endpoint) as publisher:
        publisher._queue.put(None)
        publisher._thread.join()  # from here on nothing is read while it is sent
        assert publisher._replay is not None
        for _ in range(count):
            publisher._send(b"tiny", [AllBlocksCleared()] * 200)
        ask.rcvhwm = 10
        ask.connect(endpoint)
        ask.send_multipart([b"", bytes(8)])
        assert publisher._replay.poll(30_000)
        publisher._answer_replays()
        found = []
        while True:
            assert ask.poll(5_000), f"no end after {len(found)} batches"
            _, number, _ = ask.recv_multipart()
            if int.from_bytes(number, "big", signed=True) < 0:
                break
            found.append(int.from_bytes(number, "big"))
    assert found == list(range(count))
