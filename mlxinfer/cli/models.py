"""Manage the models on this machine."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import MLXInferError, ModelNotFoundError
from .common.console import did_you_mean, human_bytes
from .common.groups import Commands
from .common.options import ignore_option, model_argument

if TYPE_CHECKING:
    from ..loading.find.catalog import LocalModel


@click.group(
    cls=Commands,
    other_names={"ls": "list", "remove": "rm", "delete": "rm", "download": "pull"},
    short_help="List, show, pull and remove models.",
)
def models() -> None:
    """The models on this machine."""


@models.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array.")
def list_models(as_json: bool) -> None:
    """List installed models, converted ones, and those in the hub's cache."""
    from ..loading.find.catalog import local_models

    found = local_models()
    if as_json:
        click.echo(json.dumps([asdict(model) for model in found], default=str))
        return
    rows = [("name", "kind", "size", "weights", "context", "path"), *map(_row, found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows if found else ():
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    if not found:
        click.echo("no models here: mlxinfer models pull, or mlxinfer doctor for the demonstration models", err=True)


def _row(model: LocalModel) -> tuple[str, ...]:
    """Return a line of the list, without details if the headers cannot be read."""
    from ..loading.find.catalog import describe

    try:
        about = describe(model.name if model.kind == "alias" else model.path)
        weights, context = about.quantization, f"{about.max_context:,}" if about.max_context else ""
    except MLXInferError:
        weights = context = ""
    home, path = str(Path.home()), str(model.path)
    shown = f"~{path.removeprefix(home)}" if path.startswith(f"{home}/") else path
    return model.name, model.kind, human_bytes(model.nbytes), weights, context, shown


@models.command()
@model_argument
@ignore_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def show(model: str, ignore_config_keys: tuple[str, ...], as_json: bool) -> None:
    """Show what MODEL is, from its headers alone."""
    from ..loading.find.catalog import describe

    found = describe(model, ignore_config_keys=ignore_config_keys)
    if as_json:
        click.echo(json.dumps({**asdict(found), "bits_per_weight": found.bits_per_weight}, default=str))
        return
    click.echo(f"{found.name}  {found.path}\n")
    click.echo(f"architecture     {found.architecture}\nparameters       {found.parameters:,}")
    click.echo(f"size             {human_bytes(found.nbytes)}, {found.bits_per_weight:.2f} bits per weight")
    click.echo(f"stored as        {', '.join(f'{form} ({count} tensors)' for form, count in found.stored.items())}")
    click.echo(f"context          {found.max_context or 'known when it is loaded: runs through mlx-lm'}")
    click.echo(f"images           {f'seen, with a tower of {human_bytes(found.tower_bytes)}' if found.tower_bytes else found.blind}")
    for note in found.notes:
        click.echo(f"note: {note}")


@models.command()
@model_argument
def pull(model: str) -> None:
    """Fetch MODEL from the hub if it is not here, and print where it is."""
    from ..loading.find.resolve import resolve

    click.echo(resolve(model).path)


@models.command()
@model_argument
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
def rm(model: str, yes: bool) -> None:
    """Remove a converted or a cached MODEL from this machine."""
    from ..loading.find.catalog import remove_model

    if not yes:
        click.confirm(f"remove {_removable(model)}?", abort=True, err=True)
    click.echo(f"{human_bytes(remove_model(model))} freed")


def _removable(name: str) -> str:
    """Return the model with size and path. Raises `MLXInferError` if it is not installed or belongs to a package."""
    from ..loading.find.catalog import check_removable, local_models
    from ..loading.find.resolve import ALIASES

    check_removable(name)
    found = local_models()
    for model in found:
        if model.name == name:
            return f"{name} ({human_bytes(model.nbytes)} in {model.path})"
    if name in ALIASES:  # assembled from packages that were removed later
        return name
    near = did_you_mean(name, [model.name for model in found])
    raise ModelNotFoundError(f"there is no model {name!r} to remove{near}: see mlxinfer models list")
