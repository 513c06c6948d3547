"""Convert a checkpoint into a quantized MLX directory."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..util.words import counted
from .common.console import colours, dumb_terminal, human_bytes, tell
from .common.options import complete_model, ignore_option
from .common.stages import stages

if TYPE_CHECKING:
    from ..convert.plan.resources import Estimate
    from ..convert.report import Quality, Report

_ANNOUNCED_BYTES = 50_000_000
"""Sizes of smaller results are not printed in advance."""


@click.command(short_help="Convert a checkpoint, and quantize it.")
@click.argument("source", metavar="SRC", shell_complete=complete_model)
@click.argument("destination", metavar="DST", type=click.Path(path_type=Path))
@click.option("--bits", type=int, help="Bits of a weight: 2, 3, 4, 5, 6 or 8. Without it, and without --mode, nothing is quantized.")
@click.option("--group-size", type=int, help="Weights that share a scale: 32, 64 or 128.  [default: 64, or what the mode needs]")
@click.option("--mode", default="affine", show_default=True, help="affine, mxfp4, mxfp8 or nvfp4.")
@click.option("--bpw", type=float, help="Instead of bits: bits per weight of all that is written, each matrix in the format that suits it.")
@click.option("--target-kl", type=float, help="Instead of bits: the smallest model expected to differ so much from SRC (KL, in nats).")
@click.option("--plan", type=click.Path(path_type=Path), help="Instead of bits: a quantization_plan.json, as --bpw writes it.")
@click.option("--calibration", help="What gptq and --bpw read: samples (the model's own), random, or a text file.  [default: samples]")
@click.option("--encoder", help="How to round: fit (to what each layer computes), gptq (slower, closer) or minmax.  [default: fit]")
@click.option("--max-memory", type=float, metavar="GB", help="Keep less than this in memory at a time, as far as that can be computed.")
@click.option("--measure/--no-measure", default=None, help="Compare the result with its source on a text.  [default: if it is quick]")
@click.option("--adapter", type=click.Path(path_type=Path), help="Merge this LoRA adapter (a folder of PEFT or mlx-lm, or a GGUF file).")
@ignore_option
@click.option("--dtype", help="Store what is not quantized as float32, bfloat16 or float16.  [default: as it is]")
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
            estimated=partial(_say, destination=destination),
            **settings,
        )
    click.echo("\n".join(_lines(report)))
    if report.quality:
        _tell_verdict(report.quality)


def _say(estimate: Estimate, destination: Path) -> None:
    """Print the sizes before the conversion starts, unless it takes a moment only. The progress bar shows the time."""
    if estimate.nbytes >= _ANNOUNCED_BYTES:
        size = f"{human_bytes(estimate.nbytes)} at {estimate.bits_per_weight:.2f} bits per weight"
        tell(
            f"{human_bytes(estimate.peak)} of memory. "
            f"{destination.name} appears at the end, with {size}. Safe to interrupt: run the same command again to continue."
        )


def _lines(report: Report) -> list[str]:
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
