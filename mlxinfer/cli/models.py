"""List, show, pull and remove models."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from ..errors import MLXInferError
from .options import model_argument
from .text import human_bytes


@click.group(no_args_is_help=False, short_help="List, show, pull and remove models.")
def models() -> None:
    """The models on this machine."""


@models.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array.")
def list_models(as_json: bool) -> None:
    """List aliases, converted models, and those in the hub's cache."""
    from .catalog import entries

    found = entries()
    if as_json:
        click.echo(json.dumps([asdict(entry) for entry in found], default=str))
        return
    for entry in found:
        size = human_bytes(entry.nbytes) if entry.nbytes is not None else "-"
        click.echo(f"{entry.name:<44} {entry.source:<10} {size:>9}  {entry.path or f'not here: mlxinfer models pull {entry.name}'}")


@models.command()
@model_argument
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def show(model: str, as_json: bool) -> None:
    """Show what MODEL is, from its headers alone."""
    from .catalog import local_path
    from .facts import facts

    found = facts(local_path(model))
    if as_json:
        click.echo(json.dumps(found, default=str))
        return
    for name, value in found.items():
        shown = human_bytes(value) if name == "bytes" else f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else value
        click.echo(f"{name:<16} {shown}")


@models.command()
@model_argument
def pull(model: str) -> None:
    """Fetch MODEL from the hub, and print where it is."""
    from ..loading.resolve import resolve

    click.echo(resolve(model).path)


@models.command()
@model_argument
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
def rm(model: str, yes: bool) -> None:
    """Remove a converted or a cached MODEL from this machine."""
    from .catalog import local_path, remove

    if not yes:
        click.confirm(f"remove {model} ({local_path(model)})?", abort=True, err=True)
    try:
        click.echo(f"{human_bytes(remove(model))} freed")
    except OSError as error:
        raise MLXInferError(f"cannot remove {model}: {error.strerror}") from error
