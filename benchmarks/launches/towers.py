"""Counts the launches of vision towers on an Apple GPU: `python -m benchmarks.launches.towers` prints a line for each tower."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from .ledger import ledger
from .phantom import PhantomGPU


@dataclass(frozen=True, slots=True)
class TowerCount:
    """Launches of a tower that encodes one image. `stages` of them run one after another; `rest` are those outside of the blocks."""

    block: int
    block_stages: int
    rest: int
    names: Mapping[str, int]
    """Launches of a block by name."""


def count_tower(name: str, gpu: PhantomGPU) -> TowerCount:
    """Count the tower `name` of `benchmarks.vision.towers` in bfloat16. `gpu` must have been entered before MLX's users were imported."""
    import mlx.core as mx

    from mlxinfer.loading.weights import EmptyWeights
    from mlxinfer.models.towers import tower_of
    from mlxinfer.nn.packing import arrays

    from ..vision.towers import CASES

    case = CASES[name]
    tower = tower_of(case.config, EmptyWeights(None, tied=True))
    gpu.empty(list(arrays(tower)))
    pixels = case.pixels()
    mx.eval(pixels)
    gpu.graphs.clear()
    found = []
    stages = tower.stages(pixels, [(case.side, case.side)])
    while True:
        try:
            rows = next(stages)
        except StopIteration as end:
            mx.eval(end.value.features, *end.value.deepstack)
            break
        mx.eval(rows)
        found.append(ledger(gpu.graphs[-1]))
    middle = found[len(found) // 2]
    last = ledger(gpu.graphs[-1])
    return TowerCount(middle.count, middle.stages, found[0].count - middle.count + last.count, dict(middle.names))


if __name__ == "__main__":
    with PhantomGPU() as phantom:
        from ..vision.towers import CASES

        for each in sys.argv[1:] or CASES:
            sys.stdout.write(json.dumps({"tower": each, **asdict(count_tower(each, phantom))}) + "\n")
