"""Servers in the background: for a tool that runs, or until `mlxinfer stop`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import click

from ...errors import ServerError
from ...util.cache_dir import default_socket
from ..agents import Served
from ..common.console import tell
from .connection import ServerAddress
from .remote_model import served_model

READY = "ready on "
"""Start of the line that a server prints once it listens."""
_STARTING_S = 600.0


def find(url: str, key: str, model: str | None) -> Served | None:
    """Return a model of the server at this address, by default its first one; None without a server.

    Raises `ServerError`, and `ModelNotFoundError`."""
    try:
        found = served_model(ServerAddress(url), None if model is None else _public(model))
    except OSError:
        return None
    return Served(url, found.name, found.max_context, key)


def _public(model: str) -> str:
    from ...server.model_manager.registry import public_name

    return public_name(model)[0]


@contextmanager
def serving(url: str, key: str, model: str) -> Iterator[Served]:
    """Run a server of this model for the block; its log goes to `~/.mlxinfer/launch.log`. Raises `ServerError`."""
    address = urlsplit(url)
    if address.scheme != "http" or address.hostname not in ("127.0.0.1", "localhost") or address.port is None:
        raise ServerError(f"no server listens at {url}, and one can be started at http://127.0.0.1:PORT only")
    log = Path("~/.mlxinfer/launch.log").expanduser()
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    command = [sys.executable, "-m", "mlxinfer", "serve", model, "--no-socket", "--port", str(address.port)]
    tell(f"starting a server of {model} at {url}, which ends with the tool; its log is {log}")
    with log.open("wb") as errors:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True)
    try:
        yield _until_ready(process, url, key, model, log)
    finally:
        process.terminate()
        process.wait()


def _until_ready(process: subprocess.Popen[bytes], url: str, key: str, model: str, log: Path) -> Served:
    deadline = time.monotonic() + _STARTING_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["nothing in its log"]
            raise ServerError(f"the server ended: {last[-1].removeprefix('mlxinfer: ')}")
        # The socket opens before the model is loaded, so the first request may wait.
        if (found := find(url, key, model)) is not None:
            return found
        time.sleep(0.2)
    raise ServerError(f"the server was not ready after {_STARTING_S:g} s: see {log}")


def detach(arguments: list[str]) -> None:
    """Start `mlxinfer` with these arguments in the background, and print its addresses once it listens.

    Its log is `serve.log` beside the Unix socket's default place. Raises `ServerError` with its last line if it ends before that.
    """
    log = default_socket().with_name("serve.log")
    try:
        log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "mlxinfer", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
    except OSError as error:
        raise ServerError(f"cannot write {log}: {error.strerror or error}") from None
    try:
        lines = _lines_once_ready(process, log)
    except BaseException:  # Ctrl-C while it loads
        process.terminate()
        raise
    click.echo("\n".join(line for line in lines if line.startswith(READY)))
    tell(f"process {process.pid}, log {log}; mlxinfer stop ends it")


def _lines_once_ready(process: subprocess.Popen[bytes], log: Path) -> list[str]:
    """Return the lines of the log once the server listens."""
    while True:
        ended = process.poll() is not None
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        if any(line.startswith(READY) for line in lines):
            return lines
        if ended:
            raise ServerError((lines or [f"the server ended with code {process.returncode}"])[-1].removeprefix("mlxinfer: "))
        time.sleep(0.05)
