"""The commands of the benchmarks."""

from __future__ import annotations

import json

import click

from .batch.command import batch
from .batch.command import show as show_batch
from .common.options import stored_path
from .common.study import place
from .compare.command import compare
from .compare.command import show as show_compare
from .experts.command import experts
from .experts.eviction import eviction
from .experts.exactness import exactness
from .experts.macs import expert_macs
from .experts.predictions import expert_predictions
from .experts.reads import expert_reads
from .kernels.command import attention_gpu, kernels_compile, products_gpu, step
from .kv.command import kv_quality
from .launches.command import launches
from .launches.command import show as show_launches
from .serving.command import serving
from .serving.command import show as show_serving
from .serving.first_token import first_token
from .structure import structure
from .vision.command import vision

SHOW = {"compare": show_compare, "batch": show_batch, "serving": show_serving, "launches": show_launches}


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def main() -> None:
    """Compare this project with mlx-lm and llama.cpp, in one run."""


@main.command()
@click.argument("name", default="cpu")
def report(name: str) -> None:
    """Print the tables of the stored results NAME, and draw their picture again."""
    path = stored_path(name)
    try:
        about = json.loads(place(path, "json").read_text(encoding="utf-8"))
        study = about.get("study", "compare")
        if study not in SHOW:
            raise ValueError(f"the study {study} is finished, and its tables are in {place(path, 'md')}")
        SHOW[study](path, about)
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error


_MEASURING = (attention_gpu, batch, compare, first_token, kernels_compile, kv_quality, launches, products_gpu, serving, step, vision)
for command in (*_MEASURING, eviction, exactness, expert_macs, expert_predictions, expert_reads, experts, structure):
    main.add_command(command)

if __name__ == "__main__":
    main(prog_name="python -m benchmarks")
