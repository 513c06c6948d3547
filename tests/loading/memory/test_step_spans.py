"""Memory of a step with images whose rows see one another, which attend in plain MLX."""

from __future__ import annotations

import mlx.core as mx
import pytest
from support.engines.tiny_engine import tiny_model

from mlxinfer import kernels_cpu
from mlxinfer.cache.attention.reference_chunks import PlainSize
from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.loading.memory.step import StepRows, step_size


@pytest.mark.skipif(not kernels_cpu.in_use(), reason="needs the CPU kernels, which attend to text without plain MLX")
@pytest.mark.parametrize("kv", [KVFormat(), KVFormat(4, 4)], ids=lambda kv: kv.name)
def test_only_spans_need_the_memory_of_plain_mlx(kv: KVFormat) -> None:
    def size(name: str, span: int) -> int:
        return step_size(tiny_model(name), mx.float32, kv, StepRows(rows=300, sequences=2, drafts=0, span=span)).at(4096, 2)

    spec = next(spec for spec in tiny_model("gemma3_text").layers if spec.window is None)
    attention = PlainSize(spec, 280, 4, kv.quantized, False).bytes(4096, 2)
    assert size("gemma3_text", 280) - size("gemma3_text", 0) >= attention
    assert size("llama", 280) == size("llama", 0)
