"""Plans with the numbers of Macs, for published models. Nothing is computed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from support.models.mac_models import GEMMA3_4B_TEXT, QWEN3_8B, MetaMatrices

from mlxinfer.cache.attention import metal, select
from mlxinfer.cache.attention import prefill_choice as prefill_way
from mlxinfer.cache.attention import reference_chunks as plain_parts
from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.errors import MemoryPlanError
from mlxinfer.kernels_metal import executors, kernel_trial
from mlxinfer.loading.memory import plan as memory_plan
from mlxinfer.loading.memory import step as step_memory
from mlxinfer.loading.memory.plan import MemoryPlan, plan_memory
from mlxinfer.models import build
from mlxinfer.models.decoder import Model
from mlxinfer.util.device import DeviceMemory

MAC_8GB = DeviceMemory(8_590_000_000, 5_730_000_000, "recommended working set", 100_000)
MAC_16GB = DeviceMemory(17_180_000_000, 11_450_000_000, "recommended working set", 200_000)
CHAT = {"max_num_seqs": 1}


@dataclass(frozen=True)
class Outline:
    model: Model
    weight_bytes: int
    load_bytes: int = 0
    dtype: mx.Dtype = mx.bfloat16


@pytest.fixture(autouse=True)
def mac(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU whose kernels have passed their trial."""
    for module in (plain_parts, kernel_trial, memory_plan, step_memory):
        monkeypatch.setattr(module, "is_gpu", lambda: True)
    monkeypatch.setattr(select, "gpu_backend", lambda *_: metal.METAL)
    monkeypatch.setattr(select.kernels_cpu, "in_use", lambda: False)
    monkeypatch.setattr(executors, "available", lambda: True)
    monkeypatch.setenv("MLX_MAX_MB_PER_BUFFER", str(MAC_8GB.total // 10**8))


def outline(config: dict[str, Any], gigabytes: float) -> Outline:
    return Outline(build(config, MetaMatrices()), int(gigabytes * 1e9))


def planned(config: dict[str, Any], gigabytes: float, memory: DeviceMemory = MAC_8GB, **options: Any) -> MemoryPlan:
    plan = plan_memory(outline(config, gigabytes), memory=memory, **options)
    assert plan.used <= plan.limit
    return plan


def test_gemma_3_4b_in_4_bits_has_a_long_chat_on_8_gb() -> None:
    assert planned(GEMMA3_4B_TEXT, 2.6, **CHAT).context >= 80_000


def test_qwen3_8b_in_4_bits_runs_on_8_gb() -> None:
    assert planned(QWEN3_8B, 4.6, **CHAT).context >= 3_500


def test_fewer_sequences_come_before_a_shorter_context_and_before_a_refusal() -> None:
    few, one = planned(QWEN3_8B, 4.6), planned(QWEN3_8B, 4.6, **CHAT)
    assert few.max_num_seqs < 16
    assert few.context == pytest.approx(one.context, rel=0.1)
    assert few.rows < planned(QWEN3_8B, 4.6, MAC_16GB).rows
    assert planned(QWEN3_8B, 4.6, MAC_16GB).max_num_seqs == 16
    with pytest.raises(MemoryPlanError, match="not enough memory"):
        planned(QWEN3_8B, 5.5)


def test_what_metal_leaves_to_plain_mlx_is_counted_at_16_bits() -> None:
    sizes = {
        kv: step_memory.step_size(
            outline(QWEN3_8B, 4.6).model, mx.bfloat16, KVFormat.parse(kv), step_memory.StepRows(rows=512, sequences=1, drafts=8)
        )
        for kv in ("16", "4")
    }
    past = 32768 * 8 * 256 * 2
    assert sizes["16"].at(32768) - sizes["16"].at(0) >= 2 * min(past, plain_parts.JOINED_BYTES) - 2**22
    assert sizes["4"].at(32768) == sizes["4"].at(0)


def test_a_past_that_is_unpacked_for_mlx_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    most = MAC_8GB.usable // 64
    for module in (prefill_way, metal):
        monkeypatch.setattr(module, "most_unsealed_bytes", lambda: most)
    model, rows = outline(QWEN3_8B, 4.6).model, step_memory.StepRows(rows=512, sequences=1, drafts=8)
    fixed = []
    for faster in (False, True):
        monkeypatch.setattr(prefill_way, "unsealing_is_faster", lambda shape, faster=faster: faster)
        fixed.append(step_memory.step_size(model, mx.bfloat16, KVFormat(4, 4), rows).fixed)
    assert 2 * most < fixed[1] - fixed[0] < 3 * most


def test_heads_for_which_mlx_has_no_fused_kernel_have_their_scores_counted() -> None:
    rows = step_memory.StepRows(rows=512, sequences=1, drafts=8)
    fused, scores = (
        step_memory.step_size(build({**QWEN3_8B, "head_dim": dim}, MetaMatrices()), mx.bfloat16, KVFormat(), rows) for dim in (128, 112)
    )
    assert scores.at(16384) - fused.at(16384) > 3 * plain_parts.MOST_SCORES * 2 - 2**26


def test_sampled_rows_take_the_stages_of_a_slice() -> None:
    model = outline(GEMMA3_4B_TEXT, 2.6).model
    row = model.vocab_size * 4
    sizes = [step_memory.step_size(model, mx.bfloat16, KVFormat(), step_memory.StepRows(rows=512, sequences=n, drafts=8)) for n in (2, 16)]
    assert sizes[1].fixed - sizes[0].fixed < (144 - 18) * 5 * row


def test_rows_of_a_prompt_that_is_scored_are_as_many_as_memory_allows() -> None:
    small, large = planned(GEMMA3_4B_TEXT, 2.6, **CHAT), planned(GEMMA3_4B_TEXT, 2.6, MAC_16GB, **CHAT)
    assert 16 <= small.scored_rows < large.scored_rows <= large.rows
    assert planned(GEMMA3_4B_TEXT, 2.6, **CHAT, deterministic=True).scored_rows >= 64


def test_a_command_buffer_that_is_being_filled_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = outline(QWEN3_8B, 4.6).model, step_memory.StepRows(rows=512, sequences=1, drafts=8)
    sizes = []
    for wide in ("50", "1050", ""):
        monkeypatch.setenv("MLX_MAX_MB_PER_BUFFER", wide)
        sizes.append(step_memory.step_size(model, mx.bfloat16, KVFormat(), rows).fixed)
    assert sizes[1] - sizes[0] == 1000 * 2**20 * 2
    assert sizes[2] == sizes[0]


def test_a_growing_pool_is_there_twice_in_parts() -> None:
    plan = planned(QWEN3_8B, 4.6, MAC_16GB)
    size = step_memory.step_size(
        outline(QWEN3_8B, 4.6).model, mx.bfloat16, KVFormat(), step_memory.StepRows(rows=plan.rows, sequences=1, drafts=8)
    )
    assert size.growth(0, 1, 2**20) >= 2**20 * 8 * 256 * 2 - size.at(0)
    assert size.growth(plan.context, 1, plan.pool_tokens) <= plan.growth or not plan.growth


def test_the_published_numbers_are_those_of_a_file(tmp_path: Path) -> None:
    """The outline requests the tensors of a real model: with 4 bits and a scale per 64 weights they take the gigabytes given here."""
    for config, gigabytes in ((GEMMA3_4B_TEXT, 2.6), (QWEN3_8B, 4.6)):
        asked = MetaMatrices()
        build(config, asked)
        assert asked.numbers * 4.5 / 8 / 1e9 == pytest.approx(gigabytes, rel=0.2)
