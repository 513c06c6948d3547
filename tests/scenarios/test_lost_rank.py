"""`mlxinfer serve --nodes` on loopback: a rank that dies or stands still ends answers at once, and the server comes back."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from threading import Event

import pytest
from support.http.ports import free_port
from support.models.tiny_directory import tiny_directory

ROOT = Path(__file__).parents[2]
PATIENCE_S = 90
ENDS_WITHIN_S = 2.0
"""Documented limit."""


class Group:
    """Both ranks, and a client of the server."""

    def __init__(self, folder):
        ring = free_port()
        self.port = ring + 3
        model = tiny_directory(folder / "tiny", eos=False, context=4096)
        hosts = folder / "hosts.json"
        hosts.write_text(json.dumps([[f"127.0.0.1:{ring + 1}"], [f"127.0.0.1:{ring + 2}"]]))
        environment = os.environ | {"PYTHONPATH": str(ROOT), "MLXINFER_THREADS": "1"}
        command = [sys.executable, "-m", "mlxinfer", "serve", str(model), "--nodes", str(hosts), "--no-socket", "--port", str(self.port)]
        self.logs = [(folder / f"{rank}.log").open("w") for rank in (0, 1)]
        self.ranks = [
            subprocess.Popen([*command, "--rank", str(rank)], env=environment, cwd=folder, stdout=log, stderr=log)
            for rank, log in enumerate(self.logs)
        ]

    def close(self):
        for rank in self.ranks:
            rank.terminate()
        for rank, log in zip(self.ranks, self.logs, strict=True):
            rank.wait(PATIENCE_S)
            log.close()

    def health(self):
        """Return the status of /health; 0 before the server listens."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=PATIENCE_S) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return 0

    def until(self, status):
        """Wait for a status and return all statuses seen."""
        seen, end = [], time.monotonic() + PATIENCE_S
        while not seen or seen[-1] != status:
            assert time.monotonic() < end, [Path(log.name).read_text()[-2000:] for log in self.logs]
            seen.append(self.health())
            Event().wait(0.05)
        return seen

    def stream(self):
        body = {"model": "tiny", "prompt": "ab", "max_tokens": 4000, "temperature": 0, "stream": True}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        return urllib.request.urlopen(request, timeout=PATIENCE_S)

    def process_of(self, rank):
        """The process that computes, which the command has started."""
        found = subprocess.run(["pgrep", "-P", str(self.ranks[rank].pid)], capture_output=True, text=True, check=True)
        return int(found.stdout.split()[0])


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    made = Group(tmp_path_factory.mktemp("group"))
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_a_lost_rank_ends_answers_and_the_group_comes_back(group, how):
    group.until(200)
    with group.stream() as answer:
        assert b"text" in answer.readline()
        os.kill(group.process_of(1), getattr(signal, how))
        began = time.monotonic()
        last = [line for line in answer if line.startswith(b"data:")][-1]
        took = time.monotonic() - began
    error = json.loads(last[5:])["error"]
    assert error["message"].startswith("the engine stopped before the answer was finished: rank 1 (127.0.0.1) has ")
    assert took < ENDS_WITHIN_S
    assert 503 in group.until(200)
    with group.stream() as answer:
        assert b"text" in answer.readline()
