"""Describe this machine, or how a model would run on it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import click

from .common.interrupts import interrupts_end
from .common.options import ABOVE_ZERO, complete_model, experts_option, ignore_option

_REPORT = "mlxinfer-report.md"


@click.command(short_help="Describe this machine, or how a model runs on it.")
@click.argument("model", required=False, shell_complete=complete_model)
@click.option("--kv", default="16", show_default=True, help="With MODEL: the format of its cache to describe.")
@click.option("--kv-first16", is_flag=True, help="With MODEL: keep the first page of each sequence at 16 bits.")
@click.option("--memory", "memory_gb", type=ABOVE_ZERO, metavar="GB", help="With MODEL: use at most this much.")
@click.option("--draft", metavar="MODEL", shell_complete=complete_model, help="With MODEL: also load this draft model.")
@experts_option
@ignore_option
@click.option("--nodes", type=click.Path(path_type=Path), metavar="HOSTFILE", help="Ask the machines in this hostfile of MLX instead.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--report", "report_file", is_flag=False, flag_value=_REPORT, type=click.Path(path_type=Path), metavar="[FILE]",
              help=f"Write a diagnostic report to a file, without names or keys.  [default: {_REPORT}]")  # fmt: skip
def doctor(
    model: str | None,
    kv: str,
    kv_first16: bool,
    memory_gb: float | None,
    draft: str | None,
    experts_memory: float | str,
    ignore_config_keys: tuple[str, ...],
    nodes: Path | None,
    as_json: bool,
    report_file: Path | None,
) -> None:
    """Show the device, its memory, versions, models, and what is missing. With MODEL: what each layer keeps in the cache, and how the
    memory is used.
    """
    if nodes is not None:
        _check_nodes(nodes, model, kv)
        return
    if report_file is not None:
        _write_report(model, report_file)
        return
    with interrupts_end():
        from .health.diagnosis import diagnose, diagnose_model

    found = diagnose() if model is None else diagnose_model(model, kv, kv_first16, memory_gb, draft, ignore_config_keys, experts_memory)
    if as_json:
        click.echo(json.dumps(asdict(found)))
        return
    for title, lines in found.sections():
        _print_section(title, lines)


def _print_section(title: str, lines: Iterable[str]) -> None:
    click.secho(title, bold=True)
    click.echo("\n".join(f"  {line}" for line in lines))


def _check_nodes(hostfile: Path, model: str | None, kv: str) -> None:
    """Check that these machines can run a model together, and show each one's part."""
    from ..cache.kv_format import KVFormat
    from ..distributed.nodes import read_nodes
    from ..distributed.preflight import check_machines, plan_lines

    nodes = read_nodes(hostfile)
    machines = check_machines(nodes)
    _print_section("machines", [machine.line() for machine in machines])
    if model is not None:
        _print_section("plan", list(plan_lines(model, KVFormat.parse(kv), nodes, machines)))
    if any(machine.problem for machine in machines):
        raise click.ClickException("not all machines can take part")


def _write_report(model: str | None, file: Path) -> None:
    from ..loading.find.resolve import ALIASES
    from .health.report import is_report, report

    if str(file) in ALIASES or file.is_dir():
        raise click.UsageError(f"--report takes a file; name the model first: mlxinfer doctor {file} --report")
    if file.exists() and not is_report(file):
        raise click.UsageError(f"{file} exists and is not a report: choose another name")
    text = report(model)
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"cannot write {file}: {error.strerror}") from None
    click.echo(f"Written to {file}. Read it before you share it.")
