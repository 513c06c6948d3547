"""The golden checkpoints, and the columns of the table in docs/models.md: one test for each family and each feature."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxinfer.cache.base import Segment
from mlxinfer.cache.disk.storage import DiskStorage
from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.cache.paged import PagedCache
from mlxinfer.models import build
from mlxinfer.models.decoder import Model
from mlxinfer.nn.packing import settle

from .plain_weights import PlainWeights

GOLDEN = Path(__file__).parents[2] / "golden" / "arch"
NAMES = sorted(folder.name for folder in GOLDEN.iterdir())
LIMIT = 2e-3
"""Largest error of a logit, in float32."""

Test = Callable[..., Any]


def column(title: str, *, excused: dict[str, str] | None = None) -> Callable[[Test], Test]:
    """The test makes a column of the table with this title, one cell for each golden checkpoint. `excused` says why a family has none."""
    reasons = excused or {}

    def parametrized(test: Test) -> Test:
        names = [pytest.param(name, marks=pytest.mark.skip(reason=reasons[name])) if name in reasons else name for name in NAMES]
        return pytest.mark.column(title)(pytest.mark.parametrize("name", names)(test))

    return parametrized


@cache
def reference(name: str) -> tuple[list[int], np.ndarray]:
    """The tokens of a golden checkpoint, and transformers' logits for them."""
    data = np.load(GOLDEN / name / "reference.npz")
    return [int(token) for token in data["ids"]], data["logits"]


def config(name: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((GOLDEN / name / "config.json").read_text(encoding="utf-8"))
    return read


@cache
def loaded_model(name: str) -> Model:
    """As the loader leaves it: packed for the CPU kernels where these are in use."""
    return build(config(name), PlainWeights.open(GOLDEN / name / "model.safetensors"), ready=settle)


def old_keys(name: str) -> dict[str, Any]:
    """The config as transformers wrote it before version 5, by hand."""
    old = config(name)
    rope = old.pop("rope_parameters", None) or {}
    old["torch_dtype"] = old.pop("dtype")
    if isinstance(rope.get("full_attention"), dict):
        full, sliding = rope["full_attention"], rope["sliding_attention"]
        if old["model_type"] != "olmo3":
            old["rope_local_base_freq"] = sliding["rope_theta"]
        rope = full
    rope = dict(rope)
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in rope:
            old[key] = rope.pop(key)
    if old["model_type"] == "kimi_linear":
        _gather_linear(old)
    if rope.get("rope_type", "default") != "default":
        old["rope_scaling"] = {("type" if key == "rope_type" and name != "llama3_rope" else key): value for key, value in rope.items()}
    return old


def _gather_linear(old: dict[str, Any]) -> None:
    """As Kimi Linear was published: layers counted from 1, by their kinds."""
    kinds = old.pop("layer_types")
    linear = {new: old.pop(key) for key, new in LINEAR_KEYS.items()}
    for name, kind in (("full_attn_layers", "full_attention"), ("kda_layers", "linear_attention")):
        linear[name] = [layer for layer, its in enumerate(kinds, 1) if its == kind]
    dense = old.pop("mlp_layer_types").count("dense")
    published = {"first_k_dense_replace": dense, "mla_use_nope": True, "moe_router_activation_func": "sigmoid", "rope_theta": 10000.0}
    old |= {"linear_attn_config": linear, **published}


LINEAR_KEYS = {"linear_head_dim": "head_dim", "linear_num_heads": "num_heads", "linear_conv_kernel_dim": "short_conv_kernel_size"}


class ModelPages:
    """A loaded model with the cache of a running engine, fed with pieces of up to `length` tokens."""

    def __init__(self, model: Model, length: int, kv: str = "16", directory: Path | None = None, fingerprint: str = "") -> None:
        self.model = model
        self.length = length
        disk = DiskStorage(directory, 10**9) if directory else None
        self.cache = PagedCache(
            self.model.layers,
            dtype=mx.float32,
            kv_cache_tokens=4096,
            chunk=256,
            kv=KVFormat.parse(kv),
            fingerprint=fingerprint,
            prefix_cache_tokens=2048,
            snapshot_bytes=1 << 24,
            disk=disk,
        )
        self.known: dict[int, list[int]] = {}

    def open(self, tokens: list[int] | None = None) -> int:
        """A slot with what is cached of the tokens."""
        match = self.cache.find(tokens) if tokens else None
        slot = self.cache.open(match)
        self.known[slot] = list(tokens[: match.reused]) if tokens and match else []
        return slot

    def fork(self, slot: int) -> int:
        new = self.cache.fork(slot)
        self.known[new] = list(self.known[slot])
        return new

    def read(self, *parts: tuple[int, list[int]]) -> list[np.ndarray]:
        """Logits of the pieces of (slot, tokens) in one step."""
        segments, start = [], 0
        for slot, tokens in parts:
            segments.append(Segment(slot, start, len(tokens), len(self.known[slot]), max(self.length, len(self.known[slot]) + len(tokens))))
            self.known[slot] += tokens
            start += len(tokens)
        step = self.cache.begin(segments)
        row = mx.array([token for _, tokens in parts for token in tokens], mx.int32)
        logits = self.model.logits(self.model.hidden(row, step))
        mx.eval(logits, step.state)
        self.cache.commit(step, self.known)
        return [np.array(logits[s.start : s.start + s.count]) for s in segments]

    def read_all(self, slot: int, tokens: list[int], chunks: list[int]) -> np.ndarray:
        """Logits of the tokens, read in pieces of these sizes."""
        assert sum(chunks) == len(tokens)
        ends = np.cumsum(chunks)
        return np.concatenate([self.read((slot, tokens[end - count : end]))[0] for count, end in zip(chunks, ends, strict=True)])


class Pages(ModelPages):
    """Those of a golden checkpoint and its tokens."""

    def __init__(self, name: str, kv: str = "16", directory: Path | None = None) -> None:
        super().__init__(loaded_model(name), len(reference(name)[0]), kv, directory, name)


def error(logits: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(logits - expected).max())
