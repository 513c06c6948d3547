"""`python -m benchmarks launches`: what a step costs on an Apple GPU, ours and mlx-lm's, computed on any machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click

from ..files import place, publish
from ..options import stem
from ..system import ROOT, describe
from .report import document

STUDY = "launches"
DEFAULT_MODELS = ("llama-3.1", "smollm2")


@click.command()
@click.argument("models", metavar="[MODEL]...", nargs=-1)
@click.option("--bits", type=click.Choice(["2", "3", "4", "5", "6", "8", "16"]), default="4", show_default=True, help="Of the weights.")
@click.option("--past", type=click.IntRange(1), default=1024, show_default=True, help="Tokens in the cache before decoding.")
@click.option("--prompt", type=click.IntRange(2), default=4096, show_default=True, help="Tokens of the prompt.")
@click.option("--kv", default="16", show_default=True, help="Format of this project's cache.")
@click.option("--chunk", type=click.IntRange(1), help="Rows of a step of ours.  [default: the planner's]")
@click.option("--name", default=STUDY, show_default=True, help="Of the files in results/.")
def launches(models: tuple[str, ...], bits: str, past: int, prompt: int, kv: str, chunk: int | None, name: str) -> None:
    """Launches, stages, bytes and waits of MODELs on an Apple GPU, and the speeds expected from them. A MODEL is a published config (such
    as llama-3.1), a config.json, or anything that mlxinfer resolves; its weights are not needed. Writes results/NAME.json, .md and .svg.
    """
    about = describe() | {"study": STUDY, "bits": bits, "past": past, "prompt": prompt, "kv": kv, "models": {}}
    options = ["--bits", bits, "--past", str(past), "--prompt", str(prompt), "--kv", kv, *(["--chunk", str(chunk)] if chunk else [])]
    for model in models or DEFAULT_MODELS:
        about["models"][Path(model).stem if os.path.exists(model) else model] = counted([model, *options])
    path = stem("launches", name)
    path.parent.mkdir(exist_ok=True)
    place(path, "json").write_text(json.dumps(about, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    show(path, about)


def counted(arguments: list[str]) -> dict[str, Any]:
    """What `count.py` prints, run in a process of its own. Raises `click.ClickException` with its last line where it fails."""
    command = [sys.executable, "-m", "benchmarks.launches.count", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise click.ClickException((done.stderr.strip().splitlines() or ["no reason given"])[-1])
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def show(path: Path, about: dict[str, Any]) -> None:
    """The tables, and the picture where matplotlib is installed."""

    def picture(file: Path) -> None:
        from .picture import draw

        draw(about, file)

    publish(path, document(about), picture)
