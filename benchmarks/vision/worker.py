"""Encodes random images with a random tower in a separate process: `python -m benchmarks.vision.worker ENGINE`.

{"do": "load", "tower": "smolvlm-256m"}      -> {}
{"do": "encode"}                             -> {"seconds": ...}
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import mlx.core as mx

from mlxinfer import kernels_cpu
from mlxinfer.nn.packing import settle

from ..common.worker import main
from .towers import CASES, random_tower


class TowerWorker:
    """Without the CPU kernels, matrices are float32, the fastest dtype of MLX on a CPU; with them, they stay as stored, in bfloat16."""

    def load(self, tower: str) -> dict[str, Any]:
        case = CASES[tower]
        self.tower, _ = random_tower(case, mx.bfloat16 if kernels_cpu.available() else mx.float32)
        settle(self.tower)
        self.pixels, self.sizes = case.pixels(), [(case.side, case.side)]
        mx.eval(self.pixels)
        return {}

    def encode(self) -> dict[str, Any]:
        start = perf_counter()
        mx.eval(self.tower.features(self.pixels, self.sizes).features)
        return {"seconds": perf_counter() - start}


if __name__ == "__main__":
    main(lambda engine: TowerWorker(), ("load", "encode"))
