"""Manage the models on this machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING

import click

from ..errors import HubError, MLXInferError, ModelNotFoundError
from .common.console import did_you_mean, human_bytes, tell, tell_download
from .common.default_model import measured_bandwidth, recommended
from .common.groups import Commands
from .common.options import ABOVE_ZERO, ignore_option, model_argument

if TYPE_CHECKING:
    from ..loading.find.catalog import LocalModel
    from ..loading.find.known import KnownModel
    from ..loading.find.recommend import Recommendation
    from ..loading.summary import Summary

_ORIGINS = {"alias": "package", "hub": "hub's cache", "converted": "converted"}


@click.group(
    cls=Commands,
    other_names={"ls": "list", "remove": "rm", "delete": "rm", "download": "pull"},
    short_help="List, find, show, pull and remove models.",
)
def models() -> None:
    """The models on this machine, and those that can be fetched."""


@models.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array.")
def list_models(as_json: bool) -> None:
    """List the models that are on this machine.

    They are in installed packages, the hub's cache, folders that mlxinfer convert wrote, LM Studio, Ollama, llama.cpp's cache and
    ~/models.
    """
    from ..loading.find.catalog import local_models

    found = local_models()
    if as_json:
        click.echo(json.dumps([asdict(model) for model in found], default=str))
        return
    if found:
        _print_table([("name", "from", "size", "weights", "context", "changed"), *map(_row, found)])
    else:
        click.echo("no models here: mlxinfer models recommend names some for this machine", err=True)


def _print_table(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _row(model: LocalModel) -> tuple[str, ...]:
    """Return a line of the list, without details if the headers cannot be read."""
    from ..loading.find.catalog import describe

    try:
        about = describe(model.name if model.kind == "alias" else model.path)
        weights, context = about.quantization, f"{about.max_context:,}" if about.max_context else ""
    except MLXInferError:
        weights = context = ""
    changed = datetime.fromtimestamp(model.modified).strftime("%Y-%m-%d") if model.modified else ""
    return model.name, model.owner or _ORIGINS[model.kind], human_bytes(model.nbytes), weights, context, changed


@models.command()
@model_argument
@ignore_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def show(model: str, ignore_config_keys: tuple[str, ...], as_json: bool) -> None:
    """Show what MODEL is, from its headers alone.

    A name that was not fetched is described by the catalogue.
    """
    from ..loading.find.catalog import describe
    from ..loading.find.resolve import not_fetched

    if known := not_fetched(model):
        _show_known(known, as_json=as_json)
        return
    found = describe(model, ignore_config_keys=ignore_config_keys)
    if as_json:
        click.echo(json.dumps({**asdict(found), "bits_per_weight": found.bits_per_weight}, default=str))
    else:
        _show_here(found)


def _show_here(found: Summary) -> None:
    click.echo(f"{found.name}  {found.path}\n")
    click.echo(f"architecture     {found.architecture}\nparameters       {found.parameters:,}")
    click.echo(f"size             {human_bytes(found.nbytes)}, {found.bits_per_weight:.2f} bits per weight")
    click.echo(f"stored as        {', '.join(f'{form} ({count} tensors)' for form, count in found.stored.items())}")
    click.echo(f"context          {found.max_context or 'known when it is loaded: runs through mlx-lm'}")
    click.echo(f"images           {f'seen, with a tower of {human_bytes(found.tower_bytes)}' if found.tower_bytes else found.blind}")
    for note in found.notes:
        click.echo(f"note: {note}")


def _show_known(model: KnownModel, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(asdict(model)))
        return
    click.echo(f"{model.name}  {model.hub_id}, not fetched yet\n")
    click.echo(f"parameters       {model.parameters:g} B, of which a token reads {model.active:g} B")
    click.echo(f"size             {human_bytes(model.nbytes)}, {model.form} ({model.source})")
    click.echo(f"context          {model.context:,}\ngood at          {model.good_at}\nlicence          {model.licence}")


@models.command()
@model_argument
def pull(model: str) -> None:
    """Fetch MODEL if it is not here, and print its path."""
    from ..loading.find.resolve import resolve

    tell_download(model)
    click.echo(resolve(model).path)


@models.command()
@click.argument("text", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array.")
def search(text: tuple[str, ...], as_json: bool) -> None:
    """Search the catalogue, then the hub.

    Models have all words of TEXT in their names, strengths or licence. Without TEXT, the whole catalogue is listed.
    """
    from ..loading.find.known import search_known

    words = " ".join(text)
    known = search_known(words)
    repos, why = _on_the_hub(words, {model.repo for model in known}) if words else ([], "")
    if as_json:
        rows = [{**asdict(model), "config": None} for model in known]
        click.echo(json.dumps([*rows, *({"repo": repo} for repo in repos)]))
    else:
        _print_found(known, repos)
    if why:
        tell(f"the hub was not searched: {why}")
    if not known and not repos:
        raise ModelNotFoundError(f"nothing found for {words!r}: mlxinfer models search lists the catalogue")


def _on_the_hub(words: str, known: set[str]) -> tuple[list[str], str]:
    """Return repositories of the hub that are not `known`, and the reason if the hub was not searched."""
    from ..loading.find.hub import search_hub

    try:
        return [repo for repo in search_hub(words) if repo not in known], ""
    except HubError as error:
        return [], str(error)


def _print_found(known: Sequence[KnownModel], repos: Sequence[str]) -> None:
    if known:
        _print_table([("name", "size", "context", "good at", "licence"), *map(_known_row, known)])
    if repos:
        click.echo(("\n" if known else "") + "on the hub, not in the catalogue (mlxinfer models pull ORG/NAME):")
        for repo in repos:
            click.echo(f"  {repo}")


def _known_row(model: KnownModel) -> tuple[str, ...]:
    name = ", ".join(model.names)
    return name, human_bytes(model.nbytes), f"{model.context:,}", model.good_at, model.licence


@models.command()
@click.option("--memory", "memory_gb", type=ABOVE_ZERO, metavar="GB", help="Memory for weights and cache.  [default: this machine's]")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array.")
def recommend(memory_gb: float | None, as_json: bool) -> None:
    """Name the three models that fit this machine best.

    The context is what the memory plan leaves for one conversation. The speed is computed: the measured bandwidth of the memory over the
    weights that a token reads.
    """
    read_bytes = measured_bandwidth()
    found = recommended(memory_gb, read_bytes)
    if as_json:
        rows = [{**asdict(one.model), "config": None, "fits": one.context, "tokens_per_second": one.speed} for one in found]
        click.echo(json.dumps(rows))
    else:
        tell(f"computed for {_memory(memory_gb)} of weights and cache, read at {human_bytes(int(read_bytes))}/s")
        _print_table([("name", "weights", "context that fits", "speed", "good at"), *map(_recommended_row, found)])
        tell(f"mlxinfer chat {found[0].model.name} fetches it and starts")


def _memory(memory_gb: float | None) -> str:
    from ..loading.memory.plan import usable_memory

    return human_bytes(usable_memory() if memory_gb is None else int(memory_gb * 1e9))


def _recommended_row(one: Recommendation) -> tuple[str, ...]:
    model = one.model
    context = f"{one.context:,}" if one.context == model.context else f"{one.context:,} of {model.context:,}"
    speed = "" if one.speed is None else f"up to {one.speed:.{0 if one.speed >= 10 else 1}f} tokens/s"
    return model.name, human_bytes(model.nbytes), context, speed, model.good_at


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
    """Return the model with size and path. Raises `MLXInferError` if it is not here, or belongs to a package or another program."""
    from ..loading.find.catalog import check_removable, find_local, local_models
    from ..loading.find.resolve import ALIASES

    check_removable(name)
    if model := find_local(name):
        return f"{name} ({human_bytes(model.nbytes)} in {model.path})"
    if name in ALIASES:  # assembled from packages that were removed later
        return name
    near = did_you_mean(name, [model.name for model in local_models()])
    raise ModelNotFoundError(f"{name!r} is not on this machine{near}: see mlxinfer models list")
