"""The models that a server lists, from the command line and from folders."""

from __future__ import annotations

import asyncio
import http.client
import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.http.kept_models import tiny_models

from mlxinfer.cli import main
from mlxinfer.config import EngineArgs
from mlxinfer.engine.async_llm import AsyncLLM
from mlxinfer.server.model_manager.duration import seconds_of
from mlxinfer.server.model_manager.listing import Listing
from mlxinfer.server.model_manager.manager import ModelManager
from mlxinfer.server.model_manager.memory_room import MemoryRoom
from mlxinfer.server.openai.models import model_status


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("models")
    tiny_models(place, "ab")
    (place / "notes.txt").touch()
    (place / "empty").mkdir()
    (place / ".hidden").mkdir()
    (place / "one.gguf").touch()
    (place / "large-00001-of-00002.gguf").touch()
    (place / "large-00002-of-00002.gguf").touch()
    return place


def listing(**settings: object) -> Listing:
    return Listing(EngineArgs("", **settings), AsyncLLM.of)  # type: ignore[arg-type]


def test_a_folder_is_listed_and_not_loaded(folder: Path) -> None:
    found = listing()
    found.add_folder(folder)
    models = found.models({}, ())
    assert [entry.name for entry in models.registry] == ["a", "b", "large-00001-of-00002", "one"]
    assert not models.at_start
    assert {slot.keep_alive_s for slot in models.registry.slots} == {300}


def test_two_names_of_one_file_are_one_model(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "linked").symlink_to(folder / "a")
    found = listing()
    for model in (f"x={folder / 'a'}", f"y={tmp_path / 'linked'}", f"z={folder / 'b'}"):
        found.add(model)
    found.add_folder(folder)
    models = found.models({}, ())
    names = {entry.name: entry.slot for entry in models.registry}
    assert names["x"] is names["y"] is names["a"] is not names["z"]
    assert names["x"].names == ["x", "y", "a"]
    assert len(models.at_start) == 2
    assert names["x"].keep_alive_s == math.inf


def test_models_at_the_start_leave_room_for_those_that_are_asked_for(folder: Path) -> None:
    def planned(with_folder: bool) -> float:
        found = listing(memory_gb=0.1, max_context=256)
        found.add(str(folder / "a"))
        if with_folder:
            found.add_folder(folder)
        models = found.models({}, ())
        assert models.memory == 100_000_000
        (slot,) = models.at_start
        assert slot.args is not None
        return slot.args.memory_gb or 0.1

    assert planned(with_folder=False) == 0.1
    assert 0.02 < planned(with_folder=True) <= 0.05


def test_what_is_pinned_comes_first(folder: Path) -> None:
    found = listing()
    found.add(str(folder / "a"))
    found.add_folder(folder)
    models = found.models({"other": "b"}, ("other",))
    assert [(slot.name, slot.pinned) for slot in models.at_start] == [("b", True), ("a", False)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a MODEL"),
        (["--models-dir", "{}/none"], "cannot read --models-dir"),
        (["--models-dir", "{}/empty"], "there are no models in"),
        (["--models-dir", "{}", "--pin", "c"], "--pin c: unknown model"),
        (["{}/a", "--keep-alive", "soon"], "'soon' is not a duration"),
    ],
)
def test_mistakes(arguments: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", *(argument.format(folder) for argument in arguments)])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_the_property_list_has_them(folder: Path, short_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--models-dir", str(folder), "--pin", "a", "--keep-alive", "-1", "--memory", "2.5"]
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--install", "--socket", str(short_path / "run" / "s"), *given])
    assert not ended.value.code
    text = capsys.readouterr().out
    assert [text.index(f"<string>{part}</string>") for part in given]


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(5, 5), (0, 0), (0.5, 0.5), (-1, math.inf), ("5m", 300), ("1h30m", 5400), ("-1m", math.inf), ("0", 0), ("0s", 0), ("1.5s", 1.5)],
)
def test_durations(value: float | str, seconds: float) -> None:
    assert seconds_of(value) == seconds


@pytest.mark.parametrize("value", ["", "5", "soon", "5 m", "5m ", "m", "--5m", "5m-3s"])
def test_what_is_no_duration(value: str) -> None:
    assert seconds_of(value) is None


def test_a_model_that_does_not_fit_at_all_ends_the_command(folder: Path, short_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", str(folder / "a"), "--memory", "0.001", "--socket", str(short_path / "run" / "s")])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "GB" in line


@pytest.mark.long
def test_the_command(folder: Path, short_path: Path) -> None:
    """A process with a folder, and two models at the start that do not fit together."""
    environment = {**os.environ, "HOME": str(short_path), "MLXINFER_HOME": str(short_path), "PYTHONUNBUFFERED": "1"}
    given = [f"first={folder / 'a'}", f"second={folder / 'b'}", "--models-dir", str(folder), "--max-context", "256", "--memory", "0.03"]
    command = [sys.executable, "-m", "mlxinfer", "serve", *given, "--socket", "run/s", "--keep-alive", "10m"]
    process = subprocess.Popen(command, cwd=short_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().endswith("(first, second, a, b, large-00001-of-00002, one)\n")
        connection = http.client.HTTPConnection("local")
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(str(short_path / "run" / "s"))
        for name in ("second", "a", "b"):
            body = json.dumps({"model": name, "prompt": "Hello", "max_tokens": 2})
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            answer = json.load(connection.getresponse())
            assert (answer["model"], answer["usage"]["completion_tokens"]) == (name, 2)
        connection.close()
        process.terminate()
        log = [json.loads(line) for line in process.communicate(timeout=60)[1].splitlines() if line.startswith("{")]
    finally:
        process.kill()
        process.communicate()
    told = [(entry["message"], entry["model"]) for entry in log if "model" in entry and entry["logger"] == "mlxinfer"]
    assert told[:2] == [
        ("loaded", "first"),
        ("there is no room for it next to the others: it is loaded when it is asked for", "second"),
    ]
    assert [(what, who) for what, who in told[2:] if what in ("loaded", "unloaded")] == [
        ("unloaded", "first"),
        ("loaded", "second"),
        ("unloaded", "second"),
        ("loaded", "first"),
        ("unloaded", "first"),
        ("loaded", "second"),
        ("unloaded", "second"),
    ]


def test_a_broken_file_is_listed_with_its_error_and_logged_as_one(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = listing()
    found.add_folder(folder)
    slots = {entry.name: entry.slot for entry in found.models({}, ()).registry}
    manager = ModelManager(slots.values(), MemoryRoom())

    async def look() -> None:
        for _ in range(2):
            assert await manager.card(slots["one"]) is None
        assert await manager.card(slots["a"]) is not None
        await manager.close()

    asyncio.run(look())
    assert model_status(slots["a"]) == {"value": "unloaded"}
    status = model_status(slots["one"])
    assert (status["value"], status["failed"]) == ("unloaded", True)
    assert "one.gguf" in status["reason"]
    assert str(folder) not in status["reason"]
    (record,) = [record for record in caplog.records if record.name == "mlxinfer"]
    assert record.levelname == "ERROR"
    assert "one.gguf" in record.getMessage()
