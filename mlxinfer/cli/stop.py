"""End the running server, or unload one of its models."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

import click

from ..errors import ServerError
from .common.console import tell
from .common.options import complete_model
from .remote.connection import ServerAddress
from .remote.remote_model import served_model

_PATIENCE_S = 30.0
"""Seconds for running answers to end."""


@click.command(short_help="End the running server, or unload a model.")
@click.argument("model", required=False, shell_complete=complete_model)
def stop(model: str | None) -> None:
    """End the running server, or unload MODEL from it.

    Answers that are being written may end first.
    """
    address = ServerAddress()
    try:
        if model is not None:
            name = served_model(address, model).name
            address.ask("POST", "/models/unload", {"model": name})
            tell(f"{name} is unloaded once its answers have ended")
        else:
            _end(address)
    except OSError:
        raise ServerError(f"no server is running at {address}") from None


def _end(address: ServerAddress) -> None:
    """End the process that listens, and wait for its end. Raises `OSError` without a server, and `ServerError`."""
    process = address.health().get("process")
    if not isinstance(process, int):
        raise ServerError(f"the server at {address} does not tell its process: end it where it was started")
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGTERM)
    deadline = time.monotonic() + _PATIENCE_S
    while _runs(process):
        if time.monotonic() > deadline:
            raise ServerError(f"the server (process {process}) still writes answers: it ends when these have ended, or kill it")
        time.sleep(0.05)
    tell("the server has ended")


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
