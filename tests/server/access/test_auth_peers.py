"""Distinction of clients: fair scheduling, connections, and facts that one client must not learn of another."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.hostile.cases import request
from support.http.live_server import LiveServer, live_server

from mlxinfer.engine.async_llm import AsyncLLM
from mlxinfer.server.access.auth import peer
from mlxinfer.server.access.sockets import listening, peer_pid
from mlxinfer.server.settings import Limits, ServerSettings

KEY = "a shared key"


@pytest.fixture(scope="module")
def narrow(tiny_path: Path) -> Iterator[LiveServer]:
    """One answer at a time, few connections, and a key for TCP."""
    limits = Limits(connections=8, header_s=5)
    with live_server({"tiny": lambda: AsyncLLM(tiny_path, max_num_seqs=1)}, api_key=KEY, limits=limits) as live:
        yield live


def ask(live: LiveServer, *, unix: bool, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    fields = json.dumps({"model": "tiny", "prompt": "Hello", "max_tokens": 20, "temperature": 0, **body}).encode()
    raw = request(path, fields, "Content-Type: application/json", f"Authorization: Bearer {KEY}")
    status, _, answer = live.exchange(raw, unix=unix)
    assert status == 200, answer
    return json.loads(answer)


@pytest.mark.parametrize(
    ("state", "client", "expected"),
    [
        ({"unix": True, "pid": 7}, None, "process 7"),
        ({"unix": False}, ("127.0.0.1", 4000), "connection 4000"),
        ({"unix": False}, ("::1", 4000), "connection 4000"),
        ({"unix": False}, ("192.168.1.5", 4000), "address 192.168.1.5"),
    ],
)
def test_who_a_client_is(state: dict[str, Any], client: Any, expected: str) -> None:
    assert peer({"state": state, "client": client}) == expected


def test_the_system_tells_the_process_of_a_peer(narrow: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    generate = AsyncLLM.generate

    async def noted(self: AsyncLLM, *arguments: Any, **options: Any) -> Any:
        seen.append(options["client_id"])
        return await generate(self, *arguments, **options)

    monkeypatch.setattr(AsyncLLM, "generate", noted)
    ask(narrow, unix=True)
    ask(narrow, unix=True, user="me")
    program = f"""
import socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.connect({str(narrow.path)!r})
connection.sendall({request("/v1/completions", b'{"model": "tiny", "prompt": "x", "max_tokens": 1}', "Content-Type: application/json")!r})
connection.recv(4096)
"""
    with subprocess.Popen([sys.executable, "-c", program]) as child:
        assert child.wait(30) == 0
    assert seen == [f"process {os.getpid()}", "user me", f"process {child.pid}"]


def test_an_app_with_many_requests_does_not_keep_another_waiting(narrow: LiveServer) -> None:
    """One request runs at a time: 7 requests of this process without a `user`, then one over TCP."""
    ended: list[str] = []

    def run(name: str, unix: bool) -> None:
        ask(narrow, unix=unix, max_tokens=150, prompt=name)
        ended.append(name)

    with ThreadPoolExecutor(8) as pool:
        for number in range(7):
            pool.submit(run, f"app {number}", True)
        narrow.until(lambda stats: stats.running + stats.waiting >= 6)
        pool.submit(run, "editor", False).result()
    assert ended.index("editor") <= 3


def test_whoever_fills_tcp_leaves_the_socket_usable(narrow: LiveServer) -> None:
    state = narrow.server.server_state
    deadline = time.monotonic() + 60
    while state.connections and time.monotonic() < deadline:
        time.sleep(0.01)
    half_open = [narrow.connect(unix=False) for _ in range(20)]
    try:
        for connection in half_open:
            try:
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: local")
            except OSError:
                continue
        while len(state.connections) < 8 and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(OSError):
            ask(narrow, unix=False)
        assert ask(narrow, unix=True)["usage"]
    finally:
        for connection in half_open:
            connection.close()


def test_nobody_with_a_shared_key_is_told_what_others_have_sent(narrow: LiveServer) -> None:
    """The prompt is cached after the first request; only the socket's owner sees the number of cached tokens."""
    prompt = "a text of more than a page, which somebody else may have sent before. " * 4

    def cached(unix: bool) -> tuple[int, int, int, int]:
        whole = ask(narrow, unix=unix, prompt=prompt)["usage"]["prompt_tokens_details"]["cached_tokens"]
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}
        raw = request("/v1/completions", json.dumps(body).encode(), *_HEADERS)
        events = [json.loads(line[6:]) for line in narrow.exchange(raw, unix=unix)[2].decode().split("\n\n") if line.startswith("data: {")]
        streamed = events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]
        marked = [{"type": "text", "text": prompt, "cache_control": {"type": "ephemeral"}}]
        fields = json.dumps({"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": marked}]}).encode()
        answer = narrow.exchange(request("/v1/messages", fields, *_HEADERS), unix=unix)[2]
        reply = narrow.exchange(
            request("/v1/responses", json.dumps({"model": "tiny", "max_output_tokens": 2, "input": prompt}).encode(), *_HEADERS), unix=unix
        )[2]
        usage = json.loads(reply)["usage"]["input_tokens_details"]["cached_tokens"]
        return whole, streamed, json.loads(answer)["usage"]["cache_read_input_tokens"], usage

    cached(True)
    assert all(count >= 64 for count in cached(True))
    assert cached(False) == (0, 0, 0, 0)


_HEADERS = ("Content-Type: application/json", f"Authorization: Bearer {KEY}")


def test_the_process_of_a_unix_peer(short_path: Path) -> None:
    with listening(ServerSettings(socket=short_path / "run" / "s")) as (listener,), socket.socket(socket.AF_UNIX) as client:
        client.connect(listener.getsockname())
        with listener.accept()[0] as connection:
            assert peer_pid(connection) == os.getpid()


def test_a_place_that_was_left_can_be_taken_at_once(short_path: Path) -> None:
    settings = ServerSettings(socket=short_path / "run" / "s", host="127.0.0.1", port=0)
    with listening(settings) as old:
        port = old[1].getsockname()[1]
        old.leave()
        with listening(ServerSettings(socket=settings.socket, host="127.0.0.1", port=port)) as new:
            old.leave()
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(new[0].getsockname())
            assert (short_path / "run" / "s").exists()
    assert not (short_path / "run" / "s").exists()


@pytest.mark.long
def test_a_successor_starts_while_the_old_server_drains(tiny_path: Path, short_path: Path) -> None:
    environment = {**os.environ, "HOME": str(short_path), "MLXINFER_HOME": str(short_path), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "mlxinfer", "serve", str(tiny_path), "--socket", "run/s", "--no-speculate"]

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(command, cwd=short_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def connected(tokens: int) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(60)
        connection.connect(str(short_path / "run" / "s"))
        body = json.dumps({"model": "tiny", "prompt": "x", "stream": True, "max_tokens": tokens}).encode()
        connection.sendall(request("/v1/completions", body, "Content-Type: application/json"))
        return connection

    processes = [start()]
    try:
        assert processes[0].stdout
        assert processes[0].stdout.readline().startswith("ready")
        with connected(2500) as long:
            received = long.recv(4096)
            processes[0].send_signal(signal.SIGTERM)
            while (short_path / "run" / "s").exists():
                time.sleep(0.005)
            processes.append(start())
            with connected_when_there(connected) as other:
                while part := other.recv(65536):
                    if b"[DONE]" in part:
                        break
                assert part
            while part := long.recv(65536):
                received += part
            assert b"[DONE]" in received
        assert processes[0].wait(30) == 0
        assert (short_path / "run" / "s").exists()
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def connected_when_there(connect: Any) -> socket.socket:
    deadline = time.monotonic() + 60
    while True:
        try:
            return connect(2)
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.01)
