"""Small files of experts whose bytes name their layer, expert and array."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np

from mlxinfer.expert_offload import ExpertFile, ExpertFileWriter

SOURCE = {"files": ["model.gguf", 7], "layout": 1}


def layer_arrays(layer: int, experts: int, shapes: dict[str, tuple[int, ...]] | None = None) -> dict[str, mx.array]:
    """Arrays `[experts, ...]` with random numbers: codes, scales and a bias unless `shapes` has others (of bytes)."""
    rng = np.random.default_rng(layer)
    if shapes is not None:
        return {name: mx.array(rng.integers(0, 256, (experts, *shape), np.uint8)) for name, shape in shapes.items()}
    return {
        "gate_up.weight": mx.array(rng.integers(0, 2**32, (experts, 16, 8), np.uint32)),
        "gate_up.scales": mx.array(rng.standard_normal((experts, 16, 2), np.float32)).astype(mx.bfloat16),
        "down.bias": mx.array(rng.standard_normal((experts, 3), np.float32)),
    }


def write_experts(
    path: Path, layers: int = 2, experts: int = 8, source: dict[str, object] | None = None, shapes: dict[str, tuple[int, ...]] | None = None
) -> ExpertFile:
    """Write a file with equal layers `layers.0`, `layers.1` and so on."""
    with ExpertFileWriter(path, source or SOURCE) as writer:
        for layer in range(layers):
            if f"layers.{layer}" not in writer.keys:
                writer.add(f"layers.{layer}", layer_arrays(layer, experts, shapes), {"index": layer})
        return writer.finish()
