"""Checkpoints of which some matrices are replaced by random numbers of the same size."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np


def in_blocks(name: str) -> bool:
    """Return True if a tensor belongs to a block of layers."""
    return ".layers." in name


def destroyed(source: Path, target: Path, which: Callable[[str], bool] = in_blocks) -> Path:
    """Write a copy of a checkpoint whose matrices of these names are random, with the deviation of their own."""
    target.mkdir()
    shutil.copyfile(source / "config.json", target / "config.json")
    tensors, random, changed = mx.load(str(source / "model.safetensors")), np.random.default_rng(7), 0
    for name, array in tensors.items():
        if which(name) and array.ndim > 1 and mx.issubdtype(array.dtype, mx.floating):
            deviation = float(mx.std(array.astype(mx.float32)).item())
            tensors[name] = mx.array(random.normal(0, deviation, array.shape).astype(np.float32)).astype(array.dtype)
            changed += 1
    assert changed
    mx.save_safetensors(str(target / "model.safetensors"), tensors)
    return target
