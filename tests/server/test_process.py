"""The command `mlxinfer serve`: a process from its ready line to its end."""

from __future__ import annotations

import json
import logging
import os
import plistlib
import resource
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from support.models.tiny_directory import tiny_directory

from mlxinfer.cli import main

PROMPT = "a secret of the prompt"


class Process:
    def __init__(
        self, *arguments: str, cwd: Path, files: int | None = None, most_files: int | None = None, limit_gb: float | None = None
    ) -> None:
        """`files` and `most_files`: the soft and the hard limit of open files; `limit_gb`: memory of the simulated device."""
        self.path = cwd / "run" / "api.sock"
        environment = {**os.environ, "HOME": str(cwd), "MLXINFER_HOME": str(cwd), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), environment.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "mlxinfer", "serve", *arguments]
        if limit_gb is not None:
            small = f"device.memory_limit = lambda: ({int(limit_gb * 1e9)}, 'physical memory')"
            program = f"from mlxinfer.util import device; {small}; from mlxinfer.cli import main; main()"
            command = [sys.executable, "-c", program, "serve", *arguments]
        if files is not None:
            hard = f"ulimit -Hn {most_files}; " if most_files else ""
            command = ["sh", "-c", f'ulimit -Sn {files}; {hard}exec "$@"', "-", *command]
        self.process = subprocess.Popen(command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def ready(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line.startswith("ready on"), self.process.communicate()[1]
        return line

    def ask(self, **body: Any) -> socket.socket:
        raw = json.dumps({"model": "tiny", "prompt": PROMPT, **body}).encode()
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(60)
        connection.connect(str(self.path))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
        connection.sendall(head.encode() + raw)
        return connection

    def end(self, number: int = signal.SIGTERM) -> tuple[int, list[dict[str, Any]]]:
        """The exit code, and the log."""
        self.process.send_signal(number)
        return self.ended()

    def ended(self) -> tuple[int, list[dict[str, Any]]]:
        errors = self.process.communicate(timeout=60)[1]
        return self.process.returncode, [json.loads(line) for line in errors.splitlines() if line.startswith("{")]


Start = Callable[..., Process]


@pytest.fixture
def start(tiny_path: Path, short_path: Path) -> Iterator[Start]:
    started: list[Process] = []

    def run(*arguments: str, **limits: Any) -> Process:
        started.append(Process(*(arguments or ("--socket", "run/api.sock", str(tiny_path))), cwd=short_path, **limits))
        return started[-1]

    yield run
    for each in started:
        each.process.kill()
        each.process.communicate()


def read_until(connection: socket.socket, text: bytes) -> None:
    received = b""
    while text not in received:
        received += connection.recv(65536)


def read_all(connection: socket.socket) -> bytes:
    received = b""
    while part := connection.recv(65536):
        received += part
    return received


@pytest.mark.long
def test_the_first_signal_lets_answers_end(start: Start) -> None:
    server = start()
    assert server.ready() == f"ready on unix:{server.path} (tiny)"
    with server.ask(stream=True, max_tokens=1500) as running:
        read_until(running, b"data:")
        server.process.send_signal(signal.SIGTERM)
        assert b"data: [DONE]" in read_all(running)
    code, log = server.ended()
    (line,) = (entry for entry in log if entry["logger"] == "mlxinfer.access")
    assert (code, line["status"], line["completion_tokens"], line["finish_reason"]) == (0, 200, 1500, "length")
    assert not server.path.exists()


@pytest.mark.long
def test_the_second_signal_stops_them(start: Start) -> None:
    server = start()
    server.ready()
    with server.ask(stream=True, max_tokens=4000) as running:
        read_until(running, b"data:")
        server.process.send_signal(signal.SIGINT)
        server.process.send_signal(signal.SIGTERM)
        assert b"[DONE]" not in read_all(running)
    assert server.ended()[0] == 0
    assert not server.path.exists()


@pytest.mark.long
def test_signals_that_were_blocked_at_the_start(start: Start) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        server = start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    server.ready()
    assert server.end()[0] == 0


@pytest.mark.long
def test_the_log_has_no_text_of_prompts_or_answers(start: Start, tiny_path: Path) -> None:
    server = start("--socket", "run/api.sock", "--port", "0", f"named={tiny_path}", f"tiny={tiny_path}", "--alias", "claude-*=named")
    assert server.ready().endswith("(named, tiny)")
    for body in ({"max_tokens": 3}, {"model": "claude-x", "max_tokens": 3}, {"model": PROMPT}, {"odd": PROMPT}, {"stop": [PROMPT, 3]}):
        with server.ask(**body) as connection:
            assert connection.recv(65536)
    _, log = server.end()
    lines = [entry for entry in log if entry["logger"] == "mlxinfer.access"]
    assert [line["status"] for line in lines] == [200, 200, 404, 400, 400]
    assert [line.get("model") for line in lines[:2]] == ["tiny", "named"]
    assert len({line["request_id"] for line in lines}) == 5
    assert {line["client"] for line in lines} == {f"uid {os.geteuid()}"}
    assert "secret" not in json.dumps(log)


@pytest.mark.long
def test_connecting_while_the_model_loads_means_waiting(start: Start) -> None:
    server = start()
    while not _listens(server.path):
        assert server.process.poll() is None
    answers: list[bytes] = []
    waiting = threading.Thread(target=lambda: answers.append(_first_bytes(server)))
    waiting.start()
    server.ready()
    waiting.join(60)
    assert answers[0].startswith(b"HTTP/1.1 200")


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        return connection.connect_ex(str(path)) == 0


def _first_bytes(server: Process) -> bytes:
    with server.ask(max_tokens=2) as connection:
        return connection.recv(65536)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no/such/model"], "no/such/model"),
        (["--no-socket", "MODEL"], "nowhere to listen"),
        (["--socket", "x", "--no-socket", "MODEL"], "exclude each other"),
        (["--host", "0.0.0.0", "MODEL"], "needs a key"),
        (["--host", "127.0.0.1", "--api-key-file", "no-file", "MODEL"], "cannot read the API key"),
        (["MODEL", "MODEL"], "two models are called"),
        (["--alias", "other", "MODEL"], "not OTHER=NAME"),
        (["--alias", "other=nothing", "MODEL"], "not among the models"),
        (["../x=y", "MODEL"], "x"),
        (["--activated", "MODEL"], "no sockets were handed over"),
        (["--kv", "99", "MODEL"], "99"),
    ],
)
def test_mistakes_end_in_one_line(
    short_path: Path,
    tiny_path: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for logger in map(logging.getLogger, ("mlxinfer", "uvicorn")):  # as they were, afterwards
        monkeypatch.setattr(logger, "handlers", logger.handlers)
        monkeypatch.setattr(logger, "propagate", logger.propagate)
    monkeypatch.chdir(short_path)
    for name in ("HOME", "MLXINFER_HOME"):
        monkeypatch.setenv(name, str(short_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(SystemExit) as ended:
        main(["serve", *(str(tiny_path) if argument == "MODEL" else argument for argument in arguments)])
    out, errors = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert message in errors
    assert len(errors.splitlines()) == 1


def test_install_prints_a_property_list_that_launchd_reads(start: Start, tiny_path: Path, short_path: Path) -> None:
    server = start(
        "--install", f"chat={tiny_path}", "--kv", "8", "--no-speculate", "--alias", "x=chat", "--port", "8081", "--request-timeout", "30"
    )
    out, errors = server.process.communicate(timeout=60)
    found = plistlib.loads(out.encode())
    arguments = found["ProgramArguments"]
    assert arguments[1:4] == ["-m", "mlxinfer", "serve"]
    assert arguments[4:] == [
        f"chat={tiny_path}",
        "--alias",
        "x=chat",
        "--kv",
        "8",
        "--no-speculate",
        "--activated",
        "--request-timeout",
        "30",
    ]
    unix, tcp = found["Sockets"]["Listeners"]
    assert unix == {"SockPathName": str(short_path / ".mlxinfer" / "api.sock"), "SockPathMode": 0o600}
    assert (tcp["SockNodeName"], tcp["SockServiceName"]) == ("127.0.0.1", "8081")
    assert found["SoftResourceLimits"] == {"NumberOfFiles": 4096}
    assert "launchctl bootstrap" in errors


def test_install_makes_the_directory_that_launchd_does_not(start: Start, tiny_path: Path, short_path: Path) -> None:
    assert not (short_path / ".mlxinfer").exists()
    server = start("--install", str(tiny_path))
    out, errors = server.process.communicate(timeout=60)
    found = plistlib.loads(out.encode())
    for path in (found["Sockets"]["Listeners"][0]["SockPathName"], found["StandardErrorPath"]):
        assert Path(path).parent == short_path / ".mlxinfer"
    assert stat.S_IMODE((short_path / ".mlxinfer").stat().st_mode) == 0o700
    assert f"will be in {short_path / '.mlxinfer'}, which only you can enter" in errors


@pytest.mark.long
@pytest.mark.parametrize("arguments", [["--install"], []], ids=["install", "serve"])
def test_a_socket_whose_path_is_too_long_for_a_mac_is_refused(
    start: Start, tiny_path: Path, short_path: Path, arguments: list[str]
) -> None:
    path = short_path / ("d" * 100) / "s"
    server = start("--socket", str(path), *arguments, str(tiny_path))
    out, errors = server.process.communicate(timeout=60)
    assert (server.process.returncode, out) == (2, "")
    assert "can have 103 bytes" in errors
    assert "--socket or MLXINFER_SOCKET" in errors
    assert not path.parent.exists()


@pytest.mark.long
def test_four_hundred_connections_where_256_files_may_be_open(start: Start) -> None:
    """256 files is the limit in a Mac's shell."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    server = start(files=256)
    server.ready()
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 600) if hard == resource.RLIM_INFINITY else min(max(soft, 600), hard), hard))
    try:
        with ExitStack() as stack:
            connections = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(400)]
            for connection in connections:
                connection.settimeout(20)
                connection.connect(str(server.path))
            for connection in connections[::20]:  # few enough for the log to fit in its pipe
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
                assert connection.recv(4096).startswith(b"HTTP/1.1 200")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert server.end()[0] == 0


@pytest.mark.long
def test_connections_are_refused_before_files_run_out(start: Start) -> None:
    server = start(files=256, most_files=256)
    server.ready()
    with ExitStack() as stack:
        answered = 0
        for _ in range(230):
            connection = stack.enter_context(socket.socket(socket.AF_UNIX))
            connection.settimeout(20)
            connection.connect(str(server.path))
            with suppress(OSError):
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
                answered += connection.recv(4096).startswith(b"HTTP/1.1 200")
    assert answered == 192
    code, log = server.end()
    assert code == 0
    assert any("192 connections at a time" in entry["message"] for entry in log)


@pytest.mark.long
def test_two_models_share_the_memory(start: Start, tiny_path: Path, short_path: Path) -> None:
    """Each model leaves the other its memory, and both answer."""
    long = tiny_directory(short_path / "long", context=1 << 20)
    server = start("--socket", "run/api.sock", f"tiny={long}", f"other={long}", limit_gb=1.0)
    server.ready()
    for name in ("tiny", "other"):
        with server.ask(model=name, max_tokens=2) as connection:
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
    assert server.end()[0] == 0


@pytest.mark.timeout(120)
def test_more_connections_than_files_leave_the_server_alive_and_its_log_short(start: Start) -> None:
    """Without a limit asyncio would accept all waiting connections before it closes one, and log a traceback for each without a
    descriptor."""
    server = start(files=64, most_files=64)
    server.ready()
    crowd = []
    for _ in range(200):
        crowd.append(socket.socket(socket.AF_UNIX))
        crowd[-1].settimeout(60)
        crowd[-1].connect(str(server.path))
    for connection in crowd[1:]:
        with suppress(ConnectionResetError):
            connection.recv(100)  # until the block ends
    for connection in crowd:
        connection.close()
    answer = b""
    while b"200 OK" not in answer:
        with server.ask(max_tokens=2) as connection, suppress(OSError):
            answer = connection.recv(65536)
    server.process.send_signal(signal.SIGTERM)
    errors = server.process.communicate(timeout=60)[1]
    assert "out of system resource" not in errors
    assert errors.count("\n") < 100


def test_a_key_that_others_can_read_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "key"
    file.write_text("a key of the test" + "\n")
    for mode, noticed in ((0o600, False), (0o644, True)):
        file.chmod(mode)
        with pytest.raises(SystemExit):  # because the model does not exist
            main(["serve", "--api-key-file", str(file), "--no-socket", "--port", "8081", str(tmp_path / "nothing")])
        assert ("chmod 600" in capsys.readouterr().err) == noticed
