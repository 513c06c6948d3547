"""Server for a tool: a running one, or one started for the tool."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from ..errors import ServerError
from .agents import Served
from .common.console import tell

_ANSWER_S = 5.0
_STARTING_S = 600.0
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opener without proxies, which cannot reach this machine's loopback."""


def find(url: str, key: str, model: str | None) -> Served | None:
    """Return a model of the server at this address, by default its first one; None without a server. Raises `ServerError`."""
    try:
        request = urllib.request.Request(f"{url}/v1/models", headers={"authorization": f"Bearer {key}"})
        with _DIRECT.open(request, timeout=_ANSWER_S) as answer:
            listed = {each["id"]: each for each in json.load(answer)["data"]}
    except urllib.error.HTTPError as error:
        reason = "the key in $MLXINFER_API_KEY is not its own" if error.code == 401 else f"it answers {error.code}"
        raise ServerError(f"the server at {url} cannot be used: {reason}") from None
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return None
    except (ValueError, KeyError, TypeError, http.client.HTTPException):
        raise ServerError(f"what listens at {url} is no server of models: say --url") from None
    name = next(iter(listed), "") if model is None else _public(model)
    name = name if name in listed else name.removesuffix(":latest")
    if name not in listed:
        raise ServerError(f"the server at {url} has no model {name!r}, only {' and '.join(listed)}")
    return Served(url, name, int(listed[name].get("max_model_len", 8192)), key)


def _public(model: str) -> str:
    from ..server.model_manager.registry import public_name

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
