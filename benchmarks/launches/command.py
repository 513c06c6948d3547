"""`python -m benchmarks launches`: the cost of a step on an Apple GPU, of this project and mlx-lm, computed on any machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click

from ..common import options
from ..common.study import publish, write_about
from ..common.system import ROOT, describe
from .report import host_times

DEFAULT_MODELS = ("llama-3.1", "smollm2")


@click.command()
@click.argument("models", metavar="[MODEL]...", nargs=-1)
@click.option("--bits", type=click.Choice(["2", "3", "4", "5", "6", "8", "16"]), default="4", show_default=True, help="Of the weights.")
@click.option("--past", type=click.IntRange(1), default=1024, show_default=True, help="Tokens in the cache before decoding.")
@click.option("--prompt", type=click.IntRange(2), default=4096, show_default=True, help="Tokens of the prompt.")
@click.option("--kv", default="16", show_default=True, help="Format of this project's cache.")
@click.option("--chunk", type=click.IntRange(1), help="Rows of a step of this project.  [default: the memory plan's]")
@click.option("--layers", type=click.IntRange(1), help="Count only so many layers of each model.  [default: all]")
@click.option("--host", is_flag=True, help="Only print the host's time per step: built in Python, replayed by MLX, and of mlx-lm.")
@options.name("launches")
def launches(
    models: tuple[str, ...], bits: str, past: int, prompt: int, kv: str, chunk: int | None, layers: int | None, host: bool, name: str
) -> None:
    """Compute launches, stages, bytes and waits of MODELs on an Apple GPU, and the expected speeds. A MODEL is a published config (such as
    llama-3.1), a config.json, or anything that mlxinfer resolves; no weights are read. Writes results/launches/NAME.json, .md and .svg."""
    arguments = ["--bits", bits, "--past", str(past), "--prompt", str(prompt), "--kv", kv]
    arguments += [*(["--chunk", str(chunk)] if chunk else []), *(["--layers", str(layers)] if layers else [])]
    if host:
        times = {model: counted([model, *arguments, "--host"]) for model in models or DEFAULT_MODELS}
        click.echo(host_times(times, describe()["processor"]))
        return
    about = describe() | {"study": "launches", "bits": bits, "past": past, "prompt": prompt, "kv": kv, "models": {}}
    for model in models or DEFAULT_MODELS:
        about["models"][Path(model).stem if os.path.exists(model) else model] = counted([model, *arguments])
    path = options.result_path("launches", name)
    path.parent.mkdir(exist_ok=True)
    write_about(path, about)
    show(path, about)


def counted(arguments: list[str]) -> dict[str, Any]:
    """Run `count.py` in a separate process, and return its output. Raises `click.ClickException` with the last line of an error."""
    command = [sys.executable, "-m", "benchmarks.launches.count", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise click.ClickException((done.stderr.strip().splitlines() or ["no reason given"])[-1])
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def show(path: Path, about: dict[str, Any]) -> None:
    """Show stored results."""
    from .report import document

    def draw(file: Path) -> None:
        from .picture import draw

        draw(about, file)

    publish(path, document(about), draw)
