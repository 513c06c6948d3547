"""Folders with odd names in them, adapters of a model with two names, and routers that ask for all events at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mlxinfer.config import EngineArgs
from mlxinfer.engine.async_llm import AsyncLLM
from mlxinfer.errors import ServerError
from mlxinfer.server.model_manager import listing as listing_module
from mlxinfer.server.model_manager.listing import Listing, models_in


def listing(**given: object) -> Listing:
    return Listing(EngineArgs(""), AsyncLLM.of, **given)  # type: ignore[arg-type]


def test_a_name_that_cannot_be_public_leaves_the_others(tmp_path: Path) -> None:
    for name in ("good.gguf", "模型.gguf", "a..b.gguf", "x" * 150 + ".gguf"):
        (tmp_path / name).touch()
    found = listing()
    found.add_folder(tmp_path)
    models = found.models({}, ())
    assert [entry.name for entry in models.registry] == ["good"]
    assert [("a..b" in note, "NAME=MODEL" in note) for note in models.notes] == [(True, True), (False, True), (False, True)]


def test_of_two_files_with_one_name_the_log_says_which_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "a b.gguf").write_bytes(b"1")
    (tmp_path / "a-b.gguf").write_bytes(b"2")
    os.link(tmp_path / "a b.gguf", tmp_path / "a+b.gguf")  # the same file: nothing is left out
    found = listing()
    found.add_folder(tmp_path)
    models = found.models({}, ())
    assert [Path(slot.args.path_or_id).name for slot in models.registry.slots if slot.args] == ["a b.gguf"]
    (note,) = models.notes
    assert "a-b.gguf" in note


def test_what_cannot_be_read_is_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "locked").mkdir()
    (tmp_path / "good.gguf").touch()
    monkeypatch.setattr(listing_module.os, "access", lambda path, mode: Path(path).name != "locked")  # root may read everything

    def refused(self: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_file", lambda self: refused(self) if self.parent.name == "locked" else os.path.isfile(self))
    assert [path.name for path in models_in(tmp_path)] == ["good.gguf"]


def test_two_adapters_of_one_name_for_one_model_are_refused(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    found = listing(adapters={"x:a": "/one", "y:a": "/two"})
    found.add(f"x={tmp_path / 'm.gguf'}")
    found.add(f"y={tmp_path / 'm.gguf'}")
    with pytest.raises(ServerError, match="x and y are one model with two adapters 'a'"):
        found.models({}, ())


def test_a_replay_of_more_than_a_socket_holds_by_default(short_path: Path) -> None:
    zmq = pytest.importorskip("zmq")
    pytest.importorskip("msgspec")
    from mlxinfer.cache.kv_events import AllBlocksCleared
    from mlxinfer.server.routers.kv_events import KVEventPublisher

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
