"""List the models that the running server has loaded."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from typing import Any

import click

from ..errors import ServerError
from .common.console import human_bytes
from .remote.connection import ServerAddress
from .remote.remote_model import models_of

_TITLES = ("NAME", "MEMORY", "AT MOST", "CONTEXT", "UNLOADED")


@click.command(short_help="List the models that the running server has loaded.")
@click.option("--url", metavar="URL", help="Ask the server at this address.  [default: your own server]")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array.")
def ps(url: str | None, as_json: bool) -> None:
    """List the models that the running server has loaded, with their memory in use and the maximum of their plan."""
    found = running(ServerAddress(url))
    if as_json:
        click.echo(json.dumps(found))
    elif not found:
        click.echo(f"No model is loaded. The server can load {', '.join(models_of(ServerAddress(url)))}.")
    else:
        rows = [_TITLES, *map(_row, found)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        click.echo("\n".join("   ".join(map(str.ljust, row, widths)).rstrip() for row in rows))


def running(address: ServerAddress) -> list[dict[str, Any]]:
    """Return the loaded models, as Ollama's API has them. Raises `ServerError` without a server."""
    try:
        found: list[dict[str, Any]] = address.ask("GET", "/api/ps")["models"]
    except OSError:
        raise ServerError(f"no server is running at {address}: mlxinfer serve MODEL --detach starts one") from None
    return [{**model, "name": model["name"].removesuffix(":latest")} for model in found]


def _row(model: dict[str, Any]) -> tuple[str, ...]:
    same = not model["size"] and not model["size_limit"]  # another name of the model above
    sizes = ("the same", "") if same else (human_bytes(model["size"]), human_bytes(model["size_limit"]))
    return (model["name"], *sizes, f"{model['context_length']:,}", _when(model["expires_at"]))


def _when(text: str) -> str:
    """Return the time until a model is unloaded."""
    if text.startswith("9999"):
        return "never"
    seconds = (datetime.fromisoformat(text.replace("Z", "+00:00")) - datetime.now(timezone.utc)).total_seconds()
    if seconds < 1:
        return "soon"
    count, unit = (seconds, "s") if seconds < 100 else (seconds / 60, "min") if seconds < 6000 else (seconds / 3600, "h")
    return f"in {count:.0f} {unit}"
