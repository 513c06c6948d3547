"""A server process as a router sees it: events of cached pages, and a /health that turns to 503 before the server stops."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from http.client import HTTPConnection

import pytest

msgspec = pytest.importorskip("msgspec")
zmq = pytest.importorskip("zmq")


def started(path, directory, *options):
    """A server process and its port."""
    command = [sys.executable, "-m", "mlxinfer", "serve", f"tiny={path}", "--no-socket", "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=directory, env=os.environ | {"HOME": str(directory)})
    assert process.stdout is not None
    return process, int(process.stdout.readline().split("ready on ")[1].split()[0].rstrip(",/").rpartition(":")[2])


def asked(port, path, body=None):
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("POST" if body else "GET", path, json.dumps(body) if body else None, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read() or b"{}")
    finally:
        connection.close()


@pytest.mark.long
def test_health_turns_while_everything_is_still_answered(tiny_path, tmp_path):
    process, port = started(tiny_path, tmp_path, "--drain", "600")
    try:
        assert asked(port, "/health")[0] == 200
        process.send_signal(signal.SIGTERM)
        while (found := asked(port, "/health"))[0] == 200:
            time.sleep(0.01)
        assert (found[0], found[1]["status"]) == (503, "draining")
        status, answer = asked(port, "/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 4})
        assert (status, answer["usage"]["completion_tokens"]) == (200, 4)
        process.send_signal(signal.SIGTERM)  # a second one does not wait
        assert process.wait(60) == 0
    finally:
        process.kill()


@pytest.mark.long
def test_events_tell_what_is_cached(tiny_path, tmp_path, short_path):
    events, replay = f"ipc://{short_path}/e", f"ipc://{short_path}/r"
    process, port = started(tiny_path, tmp_path, "--kv-events", events, "--kv-events-replay", replay)
    try:
        prompt = list(range(5, 60)) * 4
        asked(port, "/v1/completions", {"model": "tiny", "prompt": prompt, "max_tokens": 1})
        found: list[list[object]] = []
        with zmq.Context() as context, context.socket(zmq.DEALER) as ask:
            ask.connect(replay)
            while not any(event[0] == "BlockStored" for event in found):
                ask.send_multipart([b"", (0).to_bytes(8, "big")])
                found = []
                while int.from_bytes((answer := ask.recv_multipart())[1], "big", signed=True) >= 0:
                    found += msgspec.msgpack.decode(answer[2])[1]
        assert found[0] == ["AllBlocksCleared"]
        stored = [event for event in found if event[0] == "BlockStored"]
        assert [token for event in stored for token in event[3]] == prompt[:192]  # 3 pages of 64
    finally:
        process.terminate()
        process.wait(60)


@pytest.mark.long
def test_missing_libraries_and_wrong_endpoints_are_one_line(tiny_path, tmp_path):
    command = [sys.executable, "-m", "mlxinfer", "serve", f"tiny={tiny_path}", "--no-socket", "--port", "0"]
    for options, words in ((["--kv-events", "5557"], "tcp://ADDRESS:PORT"), (["--kv-events-replay", "tcp://127.0.0.1:1"], "--kv-events")):
        ended = subprocess.run([*command, *options], capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False)
        assert (ended.returncode, words in ended.stderr, "Traceback" in ended.stderr) == (2, True, False)
