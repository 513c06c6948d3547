"""Adapters of random numbers for the tiny directories, in every file format, and the same merged into the weights in float32."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..formats.gguf_file import Tensor, Typed, array_tensor, write

PROJECTIONS = tuple(f"self_attn.{part}_proj" for part in "qkvo") + tuple(f"mlp.{part}_proj" for part in ("gate", "up", "down"))


@dataclass(frozen=True)
class Change:
    """`scale * b @ a` for one matrix, and the lengths of its rows afterwards."""

    a: np.ndarray
    b: np.ndarray
    scale: float
    magnitude: np.ndarray | None = None

    def merged(self, matrix: np.ndarray) -> np.ndarray:
        changed = matrix.astype(np.float64) + self.scale * self.b.astype(np.float64) @ self.a
        if self.magnitude is not None:
            changed *= (self.magnitude / np.linalg.norm(changed, axis=1))[:, None]
        return changed.astype(np.float32)


Changes = dict[str, Change]
"""By the name of the matrix without `.weight`."""


def weights_of(directory: Path) -> dict[str, mx.array]:
    return dict(mx.load(str(directory / "model.safetensors")))


def random_changes(
    shapes: Mapping[str, tuple[int, ...]],
    seed: int = 0,
    *,
    rank: int = 4,
    alpha: float = 8.0,
    projections: Iterable[str] = PROJECTIONS,
    layers: Iterable[int] | None = None,
    dora: bool = False,
    rslora: bool = False,
    ranks: Mapping[str, int] | None = None,
    size: float = 0.1,
) -> Changes:
    """For all these projections among tensors of these shapes; `ranks` by the last part of a name."""
    rng, found = np.random.default_rng(seed), Changes()
    for name, shape in sorted(shapes.items()):
        module, layer = name.removesuffix(".weight"), name.split(".layers.")[-1].split(".")[0]
        if not module.endswith(tuple(projections)) or (layers is not None and int(layer) not in layers):
            continue
        r = (ranks or {}).get(module.rpartition(".")[2], rank)
        a, b = rng.normal(0, 0.3, (r, shape[1])), rng.normal(0, size / 0.3, (shape[0], r))
        magnitude = rng.uniform(0.5, 1.5, shape[0]).astype(np.float32) if dora else None
        scale = alpha / (math.sqrt(r) if rslora else r)
        found[module] = Change(a.astype(np.float32), b.astype(np.float32), scale, magnitude)
    assert found
    return found


def shapes_of(directory: Path) -> dict[str, tuple[int, ...]]:
    return {name: tuple(array.shape) for name, array in weights_of(directory).items() if array.ndim == 2}


def write_peft(
    target: Path, changes: Changes, *, alpha: float = 8.0, rank: int = 4, prefix: str = "base_model.model.", **config: Any
) -> Path:
    target.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, mx.array] = {}
    for module, change in changes.items():
        tensors[f"{prefix}{module}.lora_A.weight"] = mx.array(change.a)
        tensors[f"{prefix}{module}.lora_B.weight"] = mx.array(change.b)
        if change.magnitude is not None:
            tensors[f"{prefix}{module}.lora_magnitude_vector"] = mx.array(change.magnitude)
    mx.save_safetensors(str(target / "adapter_model.safetensors"), tensors)
    settings = {
        "peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none", "fan_in_fan_out": False, "lora_dropout": 0.0,
        "target_modules": sorted({module.rpartition(".")[2] for module in changes}), "modules_to_save": None, "task_type": "CAUSAL_LM",
        "use_dora": any(change.magnitude is not None for change in changes.values()), "init_lora_weights": True,
    }  # fmt: skip
    (target / "adapter_config.json").write_text(json.dumps(settings | config))
    return target


def write_mlx_lm(target: Path, changes: Changes, *, layers: int = -1, **config: Any) -> Path:
    target.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, mx.array] = {}
    for module, change in changes.items():
        tensors[f"{module}.lora_a"], tensors[f"{module}.lora_b"] = mx.array(change.a.T.copy()), mx.array(change.b.T.copy())
        if change.magnitude is not None:
            tensors[f"{module}.m"] = mx.array(change.magnitude)
    mx.save_safetensors(str(target / "adapters.safetensors"), tensors)
    first = next(iter(changes.values()))
    keys = sorted({module.split(".", 3)[3] for module in changes})
    settings = {
        "fine_tune_type": "lora" if first.magnitude is None else "dora", "num_layers": layers,
        "lora_parameters": {"rank": len(first.a), "scale": first.scale, "dropout": 0.0, "keys": keys},
    }  # fmt: skip
    (target / "adapter_config.json").write_text(json.dumps(settings | config))
    return target


GGUF_NAMES = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output", "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down"}


def write_gguf_adapter(
    target: Path, changes: Changes, *, alpha: float = 8.0, heads: int = 0, kv_heads: int = 0, extra: Iterable[Tensor] = (), **metadata: Any
) -> Path:
    """With `heads`, rows of queries and keys are in neighbouring pairs, as llama.cpp's converter for llama orders them."""
    tensors: list[Tensor] = []
    for module, change in changes.items():
        layer, part = module.split(".")[2], module.rpartition(".")[2].removesuffix("_proj")
        count = {"q": heads, "k": kv_heads}.get(part, 0)
        b = change.b
        if count:
            b = b.reshape(count, 2, -1, b.shape[1]).swapaxes(1, 2).reshape(b.shape)
        stem = f"blk.{layer}.{GGUF_NAMES[part]}.weight"
        tensors += [array_tensor(f"{stem}.lora_a", change.a), array_tensor(f"{stem}.lora_b", b)]
    values = {"general.type": "adapter", "general.architecture": "llama", "adapter.type": "lora", "adapter.lora.alpha": Typed("f32", alpha)}
    return write(target, values | metadata, [*tensors, *extra])


def merge(directory: Path, changes: Changes) -> Path:
    """Put the changed matrices in the place of the directory's own, in float32."""
    weights = {name: array.astype(mx.float32) for name, array in weights_of(directory).items()}
    for module, change in changes.items():
        weights[f"{module}.weight"] = mx.array(change.merged(np.array(weights[f"{module}.weight"])))
    mx.save_safetensors(str(directory / "model.safetensors"), weights)
    return directory


def without_magnitude(changes: Changes) -> Changes:
    return {name: replace(change, magnitude=None) for name, change in changes.items()}
