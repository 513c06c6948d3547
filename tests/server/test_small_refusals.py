"""What refusals tell: the methods that a path takes, the limit that was passed, what to do; and what nobody is told without the key."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hostile.cases import request
from support.http.live_server import LiveServer, live_server

from mlxinfer.cli import main
from mlxinfer.engine.async_llm import AsyncLLM
from mlxinfer.errors import ServerError
from mlxinfer.server.access.sockets import private_directory
from mlxinfer.server.errors import timed_out

KEY = "a key of the test"


@pytest.fixture(scope="module")
def locked(tiny_path: Path) -> Iterator[LiveServer]:
    with live_server({"tiny": lambda: AsyncLLM(tiny_path)}, api_key=KEY) as server:
        yield server


@pytest.mark.parametrize(("method", "path", "allowed"), [("GET", "/v1/completions", "POST"), ("POST", "/metrics", "GET, HEAD")])
def test_a_path_says_which_methods_it_takes(live: LiveServer, method: str, path: str, allowed: str) -> None:
    status, headers, _ = live.exchange(request(path, method=method), unix=True)
    assert (status, headers["allow"]) == (405, allowed)


def test_health_tells_the_network_no_more_than_health(locked: LiveServer) -> None:
    status, _, body = locked.exchange(request("/health", method="GET"))
    assert (status, json.loads(body)) == (200, {"status": "ok", "version": "", "models": [], "states": {}})
    for unix, lines in ((False, (f"Authorization: Bearer {KEY}",)), (False, (f"x-api-key: {KEY}",)), (True, ())):
        found = json.loads(locked.exchange(request("/health", b"", *lines, method="GET"), unix=unix)[2])
        assert found["models"] == ["tiny"]
        assert found["version"]
    assert json.loads(locked.exchange(request("/health", b"", "x-api-key: another", method="GET"))[2])["models"] == []


def test_a_limit_is_named_with_its_option() -> None:
    assert timed_out(20.0).message == "The request took longer than the 20 s that it may (serve --request-timeout)."


def test_nobody_is_told_to_close_a_directory_that_others_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid)
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    with pytest.raises(ServerError, match="open to others: put the socket in a folder of your own below it") as found:
        private_directory(shared)
    assert "chmod" not in str(found.value)


def test_a_key_that_others_can_read_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "key"
    file.write_text(KEY + "\n")
    for mode, noticed in ((0o600, False), (0o644, True)):
        file.chmod(mode)
        with pytest.raises(SystemExit):  # for the model's name
            main(["serve", "--api-key-file", str(file), "--no-socket", "--port", "8081", str(tmp_path / "nothing")])
        assert ("chmod 600" in capsys.readouterr().err) == noticed
