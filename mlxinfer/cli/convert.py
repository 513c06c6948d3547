"""Convert a checkpoint into a quantized MLX directory."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..convert.args import ConvertArgs
from ..util.words import counted
from .common.console import colours, dumb_terminal, human_bytes, tell
from .common.options import complete_model, options_of
from .common.stages import stages

if TYPE_CHECKING:
    from ..convert.plan.resources import ConversionEstimate
    from ..convert.report import Quality, Report

_ANNOUNCED_BYTES = 50_000_000
"""Sizes of smaller results are not printed in advance."""


@click.command(short_help="Convert a checkpoint, and quantize it.")
@click.argument("source", metavar="SRC", shell_complete=complete_model)
@click.argument("destination", metavar="DST", type=click.Path(path_type=Path))
@options_of(ConvertArgs)
def convert(source: str, destination: Path, **settings: Any) -> None:
    """Write SRC (a directory, a GGUF file, a hub id or an alias) as an MLX directory DST, which mlx-lm loads as well.

    Tensors are converted one by one, so memory is bounded by the largest one. DST appears when all of it is written and verified.
    """
    from ..convert import convert as convert_checkpoint

    with stages() as shown:
        report = convert_checkpoint(
            source,
            destination,
            weighing=shown.of("reading texts, block by block"),
            progress=shown.of(f"converting {source}"),
            measuring=shown.of(f"measuring the loss before {destination.name} appears", "positions"),
            estimated=partial(_announce, destination=destination),
            **settings,
        )
    click.echo("\n".join(_report_lines(report)))
    if report.quality:
        _tell_verdict(report.quality)


def _announce(estimate: ConversionEstimate, destination: Path) -> None:
    """Print the sizes before the conversion starts, unless it takes a moment only. The progress bar shows the time."""
    if estimate.nbytes >= _ANNOUNCED_BYTES:
        size = f"{human_bytes(estimate.nbytes)} at {estimate.bits_per_weight:.2f} bits per weight"
        tell(
            f"{human_bytes(estimate.peak)} of memory. "
            f"{destination.name} appears at the end, with {size}. Safe to interrupt: run the same command again to continue."
        )


def _report_lines(report: Report) -> list[str]:
    lines = [f"{report.destination}", f"{human_bytes(report.nbytes)}, {report.bits_per_weight:.2f} bits per weight"]
    lines[1] += f" (from {human_bytes(report.source_nbytes)})"
    lines.append(", ".join(f"{counted(count, 'tensor')} {action}" for action, count in report.actions.items()))
    worst = max(report.tensors, key=lambda tensor: tensor.error, default=None)
    if worst and worst.error:
        lines.append(f"largest relative error {worst.error:.4f} ({worst.name})")
    if report.skipped:
        lines.append(f"{counted(len(report.skipped), 'tensor')} left out: {'; '.join(sorted(set(report.skipped.values())))}")
    lines += [f"note: {note}" for note in report.notes]
    if report.quality:
        quality = report.quality
        stderr = "" if quality.kl_stderr is None else f" ± {quality.kl_stderr:.4f}"
        same = f"same likeliest token {quality.top1:.1%}, at {quality.tokens:,} positions"
        lines.append(f"against the source: KL {quality.kl:.4f}{stderr} nats, {same}")
    return lines


def _tell_verdict(quality: Quality) -> None:
    """Print the verdict on the figures; a bad model stands out."""
    if quality.level in ("poor", "unusable"):
        click.secho(quality.verdict, bold=True, fg="red" if colours() else None, color=False if dumb_terminal() else None)
        click.echo("More bits lose less (--bits, --bpw), and so does --encoder gptq.")
    else:
        click.echo(quality.verdict)
