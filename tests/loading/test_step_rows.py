"""How many rows the largest step of a GPU gets: as many as its memory hardly notices."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import pytest
from support.checkpoints import config_of

from mlxinfer.device import DeviceMemory
from mlxinfer.loading import memory_plan, step_memory
from mlxinfer.loading.memory_plan import MemoryPlan, plan_memory
from mlxinfer.models import build
from mlxinfer.models.decoder import Model
from mlxinfer.nn.weights import Dense

QWEN3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "layer_types": ["full_attention"] * 36,
}


class Shapes:
    """A `Weights` of arrays that are never computed."""

    def has(self, name: str) -> bool:
        return name == "lm_head.weight"

    def matrix(self, name: str, shape: tuple[int, ...], **_: Any) -> Dense:
        return Dense(mx.zeros(shape, mx.bfloat16))

    def vector(self, name: str, shape: tuple[int, ...], **_: Any) -> mx.array:
        return mx.zeros(shape, mx.bfloat16)


@dataclass(frozen=True)
class Quantized:
    model: Model = field(default_factory=lambda: build(config_of("qwen3", **QWEN3_8B), Shapes()))
    weight_bytes: int = 4_600_000_000
    load_bytes: int = 0
    dtype: mx.Dtype = mx.bfloat16


def planned(monkeypatch: pytest.MonkeyPatch, usable: float, chunks: tuple[int, ...] = memory_plan._GPU_CHUNKS) -> MemoryPlan:
    for module in (memory_plan, step_memory):
        monkeypatch.setattr(module, "is_gpu", lambda: True)
    monkeypatch.setattr(memory_plan, "_GPU_CHUNKS", chunks)
    return plan_memory(Quantized(), memory=DeviceMemory(int(1.5 * usable), int(usable)), max_sequences=2)


@pytest.mark.parametrize(("usable", "rows"), [(48e9, 2048), (22e9, 2048), (11.4e9, 1024), (5.7e9, 512)], ids=["64", "32", "16", "8"])
def test_long_steps_where_memory_allows(usable, rows, monkeypatch):
    """Macs of that many gigabytes."""
    plan, short = planned(monkeypatch, usable), planned(monkeypatch, usable, (512,))
    assert plan.rows == rows
    assert plan.pool_tokens > 0.9 * short.pool_tokens
