"""What this machine has for running models, and what it lacks."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from .options import complete_model


@click.command(short_help="What this machine has, and what it lacks.")
@click.argument("model", required=False, shell_complete=complete_model)
@click.option("--kv", default="16", show_default=True, help="With MODEL: the format of its cache to describe.")
@click.option("--kv-first16", is_flag=True, help="With MODEL: keep the first page of each sequence at 16 bits.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(model: str | None, kv: str, kv_first16: bool, as_json: bool) -> None:
    """Show the device, how its memory will be used, versions, models, and what is missing; with MODEL, what each of its layers keeps
    in the cache."""
    from .diagnosis import diagnose, diagnose_model

    found = diagnose_model(model, kv, kv_first16) if model else diagnose()
    if as_json:
        click.echo(json.dumps(asdict(found)))
        return
    for title, lines in found.sections():
        click.secho(title, bold=True)
        click.echo("\n".join(f"  {line}" for line in lines))
