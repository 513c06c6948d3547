"""What this machine has for running models, and what it lacks."""

from __future__ import annotations

import json
from dataclasses import asdict

import click


@click.command(short_help="What this machine has, and what it lacks.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(as_json: bool) -> None:
    """Show the device, how its memory will be used, versions, models, and what is missing."""
    from .diagnosis import diagnose

    found = diagnose()
    if as_json:
        click.echo(json.dumps(asdict(found)))
        return
    for title, lines in found.sections():
        click.secho(title, bold=True)
        click.echo("\n".join(f"  {line}" for line in lines))
