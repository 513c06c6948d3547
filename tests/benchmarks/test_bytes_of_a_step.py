"""Bytes that a decoding step of Llama 3.1 8B at 4 bits moves, next to mlx-lm's. Counted in processes of their own, as launches are."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = 32

_COUNT = """
import json, sys
from benchmarks.launches.phantom import PhantomGPU
with PhantomGPU() as gpu:
    from benchmarks.launches.count import with_layers, written
    from benchmarks.launches.ledger import ledger
    from benchmarks.launches.models import subject
    from benchmarks.launches.programs import MLXLM, Ours
    model, found = subject("llama-3.1", 4), {}
    for kind in (Ours, MLXLM):
        for layers in (2, 4):
            turns = kind(gpu, with_layers(model, layers)).decode(int(sys.argv[1]), 1024)
            steps = [ledger(turn.graphs[0]) for turn in turns if len(turn.graphs) == 1]
            read = sum(step.distinct for step in steps) / len(steps)
            own = sum(steps[0].names[name] for name in ("affine_matmul", "affine_vector"))
            found.setdefault(kind.__name__, []).append([read, written(turns), own])
    print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="there is no g++, without which MLX fuses nothing that could be counted")
@pytest.mark.parametrize("rows", [1, 4, 8])
def test_no_more_bytes_than_mlx_lm(rows: int) -> None:
    """Averages over the steps of a page. A layer moves fewer in all, and a step of all layers writes fewer."""
    pytest.importorskip("mlx_lm")
    done = subprocess.run([sys.executable, "-c", _COUNT, str(rows)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    layer = {who: [(four - two) / 2 for two, four in zip(*steps, strict=True)] for who, steps in found.items()}
    assert sum(layer["Ours"][:2]) < sum(layer["MLXLM"][:2])
    assert layer["Ours"][2] == (1 if rows == 1 else 4), "one row: the gated product is ours; several: all four products are"
    whole = {who: steps[0][1] + (LAYERS - 2) * layer[who][1] for who, steps in found.items()}
    assert whole["Ours"] < whole["MLXLM"]
