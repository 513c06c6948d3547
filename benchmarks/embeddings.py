"""`python -m benchmarks.embeddings --torch PYTHON`: texts per second beside transformers, in pairs. Writes results/embeddings.md."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import numpy as np

from .embeddings_torch import BATCH, SIZES, VOCAB
from .options import RESULTS
from .system import describe

_SCRIPT = Path(__file__).with_name("embeddings_torch.py")
_HEAD = """# Texts per second, beside transformers

{texts} texts of {least} to {most} tokens, {tokens} in all, as token ids; float32 on both sides, {threads} threads, random weights.
transformers takes {batch} at a time, sorted by length and padded, as sentence-transformers does; this project takes all at once. Each line
is the median of {pairs} pairs whose halves ran one after the other; the range is that of the pairs. Processor time is that of all threads:
other programs change it less than the seconds. {machine}, load {load} when it began: {note}

| model | transformers, texts/s | mlxinfer, texts/s | ratio | ratio by processor time | least cosine |
| --- | --- | --- | --- | --- | --- |
"""


@click.command()
@click.option("--torch", required=True, help="A Python that has torch and transformers.")
@click.option("--pairs", type=click.IntRange(1), default=5, show_default=True)
@click.option("--texts", type=click.IntRange(1), default=64, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True, help="Of both sides.")
@click.option("--note", default="nothing else ran.", show_default=True, help="Who else used the machine.")
def main(torch: str, pairs: int, texts: int, threads: int, note: str) -> None:
    """Measure both models."""
    os.environ["MLXINFER_THREADS"] = str(threads)
    chance = np.random.default_rng(3)
    counts = np.clip(np.exp(chance.normal(3.7, 0.8, texts)), 4, 400).astype(int)
    ids = [chance.integers(3, VOCAB, count).tolist() for count in counts]
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        (folder / "ids.json").write_text(json.dumps(ids))
        subprocess.run([torch, "-P", _SCRIPT, folder], check=True)
        system = describe()
        lines = [
            _line(name, folder / sizes["model_type"], [torch, "-P", str(_SCRIPT)], threads, pairs, ids) for name, sizes in SIZES.items()
        ]
    head = _HEAD.format(
        texts=texts,
        least=min(counts),
        most=max(counts),
        tokens=sum(counts),
        threads=threads,
        batch=BATCH,
        pairs=pairs,
        machine=system["processor"],
        load=system["load_average"],
        note=note,
    )
    (RESULTS / "embeddings.md").write_text(head + "".join(lines), encoding="utf-8")
    click.echo(head + "".join(lines))


def _line(name: str, model: Path, script: list[str], threads: int, pairs: int, ids: list[list[int]]) -> str:
    from mlxinfer import LLM

    theirs, ours, cosines = np.zeros((pairs + 1, 2)), np.zeros((pairs + 1, 2)), []
    command = [*script, str(model.parent), model.name, str(threads)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with LLM(model, dtype="float32") as llm:
        for number in range(pairs + 1):
            found = _asked(other)
            began, used = time.perf_counter(), time.process_time()
            vectors = llm.embed(ids)
            ours[number] = time.perf_counter() - began, time.process_time() - used
            theirs[number] = found["seconds"], found["processor"]
            cosines.append(float((vectors * np.array(found["vectors"])).sum(1).min()))
    other.communicate()
    seconds, processor = (theirs[1:] / ours[1:]).T  # the first pair warms both up
    speeds = (f"{len(ids) / np.median(side[1:, 0]):.1f}" for side in (theirs, ours))
    return f"| {' | '.join([name, *speeds, _spread(seconds), _spread(processor)])} | {min(cosines):.6f} |\n"


def _spread(ratios: Any) -> str:
    return f"{np.median(ratios):.2f} ({ratios.min():.2f} to {ratios.max():.2f})"


def _asked(other: subprocess.Popen[str]) -> dict[str, Any]:
    assert other.stdin is not None
    assert other.stdout is not None
    other.stdin.write("\n")
    other.stdin.flush()
    found: dict[str, Any] = json.loads(other.stdout.readline())
    return found


if __name__ == "__main__":
    main()
