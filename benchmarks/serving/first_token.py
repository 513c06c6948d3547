"""`mlxinfer run` from the start of its process to the first byte of its answer: with an own copy of the model, and with a server's."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import click

_COMMAND = [sys.executable, "-m", "mlxinfer"]


def _measured(arguments: list[str]) -> tuple[float, float]:
    """Return the seconds to the first byte on standard output, and the peak memory of the process in MB."""
    started = time.perf_counter()
    process = subprocess.Popen([*_COMMAND, "run", *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    process.stdout.read(1)
    seconds = time.perf_counter() - started
    process.stdout.read()
    usage = os.wait4(process.pid, 0)[2]
    return seconds, usage.ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)


@click.command("first-token")
@click.argument("model", default="smollm2")
@click.option("--rounds", type=click.IntRange(1), default=11, show_default=True, help="Runs of each kind, in turns.")
def first_token(model: str, rounds: int) -> None:
    """Measure `mlxinfer run` with MODEL loaded by itself and by a server, in turns."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MLXINFER_SOCKET"] = str(Path(folder) / "api.sock")
        subprocess.run([*_COMMAND, "serve", model, "--detach"], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        kinds = {"own copy": ["--local"], "server": []}
        prompt = [model, "What is the capital of France?", "--max-tokens", "4", "--temperature", "0"]
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
        try:
            for _ in range(rounds):
                for name, more in kinds.items():
                    found[name].append(_measured([*prompt, *more]))
        finally:
            subprocess.run([*_COMMAND, "stop"], check=True, stderr=subprocess.DEVNULL)
    for name, pairs in found.items():
        seconds, memory = ([pair[i] for pair in pairs] for i in range(2))
        click.echo(f"{name:<10} first byte after {median(seconds):.3f} s (least {min(seconds):.3f}), {max(memory):.0f} MB in the process")
