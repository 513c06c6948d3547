"""The plan covers all uses of memory, and the memory is enough."""

from __future__ import annotations

import asyncio
import gc
import json
import re

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines.step_peak import measured_peak
from support.engines.tiny_engine import tiny_model
from support.formats.tiny_gguf import write_tiny_gguf
from support.models.planned import MB, Tiny
from support.models.tiny_directory import tiny_directory
from support.processes.active_memory import active_memory
from support.processes.examples import examples

from mlxinfer import kernels_cpu
from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.cache.paged import PagedCache
from mlxinfer.engine.async_llm import AsyncLLM
from mlxinfer.engine.llm import LLM
from mlxinfer.errors import DraftError, MemoryPlanError, PromptError
from mlxinfer.loading.directory import SafetensorsCheckpoint
from mlxinfer.loading.gguf import GGUFCheckpoint
from mlxinfer.loading.load import load, meta_model
from mlxinfer.loading.memory.plan import plan_memory
from mlxinfer.nn.weights import RawBlocks
from mlxinfer.util.device import DeviceMemory

FAMILIES = ["llama", "gemma2", "mixtral", "gpt_oss", "qwen3_5_text", "qwen3_next"]


def device(size: int, buffers: int | None = None) -> DeviceMemory:
    return DeviceMemory(2 * size, size, buffers=buffers)


@given(
    st.sampled_from(FAMILIES),
    st.integers(0, 2000),
    st.sampled_from(["16", "8", "4", "k8v4"]),
    st.integers(1, 64),
    st.booleans(),
    st.none() | st.integers(10_000, 10**6),
)
@settings(max_examples=examples(60))
def test_the_parts_are_all_that_there_is(name, size, kv, sequences, prefix_cache, buffers):
    try:
        plan = plan_memory(
            Tiny(tiny_model(name)),
            kv=KVFormat.parse(kv),
            max_num_seqs=sequences,
            prefix_cache=prefix_cache,
            memory=device(size * MB, buffers),
        )
    except MemoryPlanError:
        assert size < 100
        return
    assert plan.used <= plan.limit == size * MB
    assert plan.left >= 0
    assert plan.used + plan.left == plan.limit
    assert 1 <= plan.max_num_seqs <= sequences
    assert plan.context <= plan.pool_tokens
    assert plan.prefix_cache_tokens <= plan.pool_tokens or not plan.token
    assert buffers is None or plan.buffers <= buffers
    assert prefix_cache or plan.prefix_cache_tokens == plan.snapshots == plan.reuse == 0
    assert plan.reuse + plan.snapshots <= plan.limit / 4


@pytest.mark.skipif(not kernels_cpu.in_use(), reason="plain MLX unpacks a whole layer in a step, which takes what fewer bits save here")
def test_fewer_bits_make_room_for_more_tokens(tmp_path):
    loaded = load(tiny_directory(tmp_path, context=1 << 20), dtype="bfloat16")
    plans = {kv: plan_memory(loaded, kv=KVFormat.parse(kv), memory=device(100 * MB)) for kv in ("16", "8", "k8v4", "4")}
    sizes = [plan.pool_tokens for plan in plans.values()]
    assert sizes == sorted(sizes)
    for kv, plan in plans.items():
        assert plan.token == PagedCache.token_bytes(loaded.model.layers, mx.bfloat16, KVFormat.parse(kv))
    ratio = plans["16"].token / plans["4"].token
    assert plans["4"].room_tokens / plans["16"].room_tokens == pytest.approx(ratio, rel=0.05)
    assert plan_memory(loaded, kv=KVFormat(4, 4, first16=True), memory=device(100 * MB)).pool_tokens < sizes[-1]


def test_a_cap_and_a_draft_model_leave_less(tmp_path):
    loaded = load(tiny_directory(tmp_path, context=1 << 20), dtype="float32")
    whole = plan_memory(loaded, memory=device(200 * MB))
    capped = plan_memory(loaded, memory=device(200 * MB), memory_gb=0.1)
    drafted = plan_memory(loaded, memory=device(200 * MB), draft=Tiny(tiny_model("llama"), weight_bytes=20 * MB))
    assert capped.limit == 100_000_000
    assert capped.pool_tokens < whole.pool_tokens
    assert (drafted.weights, drafted.draft_weights) == (loaded.weight_bytes, 20 * MB)
    assert drafted.token == 2 * whole.token
    # If the past is copied, a shorter context needs less in a step, and the pool gets the difference.
    assert 2 * drafted.pool_tokens < whole.pool_tokens + max(whole.step - drafted.step, 0) / whole.token
    with pytest.raises(MemoryPlanError, match=r"0\.01 GB may be used \(memory_gb\)"):
        plan_memory(loaded, memory=device(200 * MB), memory_gb=0.01)


def test_the_refusal_names_every_part_with_digits_that_mean_something():
    with pytest.raises(MemoryPlanError) as caught:
        plan_memory(Tiny(tiny_model("llama"), weight_bytes=98_346_240), memory=device(10**9), memory_gb=0.1)
    may, needs, weights, rest = (float(number) for number in re.findall(r"[0-9.]*[0-9](?= GB|[,)])(?! tokens)", str(caught.value)))
    assert (may, weights) == (0.1, 0.0983)
    assert needs == pytest.approx(weights + rest, rel=0.01)
    assert needs > may
    assert "\n" not in str(caught.value)


def test_reading_the_weights_may_take_more_than_running_does():
    model = tiny_model("llama")
    plan_memory(Tiny(model, load_bytes=80 * MB), memory=device(100 * MB))
    with pytest.raises(MemoryPlanError, match=r"reading them 0\.0996"):
        plan_memory(Tiny(model, load_bytes=95 * MB), memory=device(100 * MB))


class Unread(Exception):
    """A weight was requested."""


def _refuse_reads(monkeypatch):
    def refused(self, name):
        raise Unread(name)

    for kind in (SafetensorsCheckpoint, GGUFCheckpoint):
        monkeypatch.setattr(kind, "read", refused)
    monkeypatch.setattr(RawBlocks, "pieces", lambda self, rows: refused(self, "blocks"))


@pytest.mark.parametrize("stored", ["safetensors", "gguf"])
def test_no_weight_is_read_where_the_plan_fails(tmp_path, monkeypatch, stored):
    model = tiny_directory(tmp_path / "m") if stored == "safetensors" else write_tiny_gguf(tmp_path / "m.gguf")
    _refuse_reads(monkeypatch)
    with pytest.raises(MemoryPlanError):
        LLM(model, memory_gb=0.01)
    with pytest.raises(PromptError):
        LLM(model, max_context=1 << 30)
    with pytest.raises(Unread):
        LLM(model)


def _async(model, **options):
    async def opened():
        async with AsyncLLM(model, **options):
            pass

    asyncio.run(opened())


@pytest.mark.parametrize("opens", [LLM, _async, load], ids=["LLM", "AsyncLLM", "load"])
def test_no_way_to_load_goes_round_the_plan(tmp_path, monkeypatch, opens):
    """On a device without memory no weight is read, through any entry."""
    model = tiny_directory(tmp_path)
    _refuse_reads(monkeypatch)
    monkeypatch.setattr("mlxinfer.util.device.memory_limit", lambda: (10 * MB, "physical memory"))
    with pytest.raises(MemoryPlanError, match=r"may be used \(physical memory\)"):
        opens(model)


def test_vocabularies_are_compared_before_a_weight_is_read(tmp_path, monkeypatch):
    model, draft = tiny_directory(tmp_path / "m"), tiny_directory(tmp_path / "draft")
    tokens = json.loads((draft / "tokenizer.json").read_text())
    vocabulary = tokens["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (draft / "tokenizer.json").write_text(json.dumps(tokens))
    _refuse_reads(monkeypatch)
    with pytest.raises(DraftError, match="needs the same vocabulary: its token"):
        LLM(model, draft=draft)
    with pytest.raises(DraftError, match="its layers keep states"):
        LLM(model, draft=tiny_directory(tmp_path / "states", "qwen3_next"))
    with pytest.raises(Unread):
        LLM(model, draft=model)


def test_two_models_in_a_process_share_its_memory(tmp_path, monkeypatch):
    model = tiny_directory(tmp_path, context=1 << 20)
    gc.collect()
    held = active_memory()
    total = 2500 * MB + held
    usable = total * 4 // 5
    monkeypatch.setattr("mlxinfer.util.device.memory_limit", lambda: (total, "physical memory"))
    with LLM(model, memory_gb=1.0) as first:
        with LLM(model) as second:
            assert first.plan.used + second.plan.used <= usable
            assert 0 <= usable - first.plan.used - second.plan.limit <= held + MB
            with pytest.raises(MemoryPlanError, match="Other models of this process hold"):
                LLM(model)
            ids = [5, 6, 7]
            assert first.generate([ids])[0].text == second.generate([ids])[0].text
        before = second.plan.limit
    with LLM(model) as alone:
        assert alone.plan.limit > before + 900 * MB


def test_a_draft_model_is_checked_against_what_the_model_leaves(tmp_path, monkeypatch):
    model, draft = tiny_directory(tmp_path / "m"), tiny_directory(tmp_path / "draft")
    with pytest.raises(MemoryPlanError) as caught:
        plan_memory(meta_model(model), memory_gb=0.001)
    needed = float(re.findall(r"needs ([0-9.]+) GB", str(caught.value))[0])
    for path in (model, draft):
        plan_memory(meta_model(path), memory_gb=1.5 * needed)
    _refuse_reads(monkeypatch)
    with pytest.raises(MemoryPlanError, match="not enough memory"):
        LLM(model, draft=draft, memory_gb=1.5 * needed)


def test_the_context_is_what_the_model_has_or_less(tmp_path):
    loaded = load(tiny_directory(tmp_path, context=1 << 20))
    assert plan_memory(loaded, max_context=500, memory=device(200 * MB)).context == 500
    assert plan_memory(loaded, memory=device(200 * MB)).context < 1 << 20
    for size in (0, 1 << 21):
        with pytest.raises(PromptError, match="context"):
            plan_memory(loaded, max_context=size)


def test_fewer_sequences_run_together_where_each_has_much(tmp_path):
    model = Tiny(tiny_model("gpt_oss"))
    many = plan_memory(model, max_num_seqs=100_000, memory=device(200 * MB))
    assert 1 < many.max_num_seqs < 100_000
    assert many.sequences <= many.limit / 2


def test_metals_limit_of_buffers_bounds_what_is_kept(tmp_path):
    model = Tiny(tiny_model("qwen3_next"))
    endless = plan_memory(model, memory=device(4000 * MB))
    bounded = plan_memory(model, memory=device(4000 * MB, buffers=20_000))
    assert endless.buffers > 20_000 >= bounded.buffers
    assert bounded.snapshots < endless.snapshots


@pytest.mark.parametrize("name", FAMILIES)
def test_an_outline_is_planned_as_the_model(tmp_path, name):
    folder = tiny_directory(tmp_path, name)
    loaded, lines = load(folder), meta_model(folder)
    real, planned = plan_memory(loaded, memory=device(500 * MB)), plan_memory(lines, memory=device(500 * MB))
    assert planned.weights <= real.weights <= planned.weights * 1.5 + MB
    assert (planned.token, planned.sequence, planned.context) == (real.token, real.sequence, real.context)


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
def test_no_step_takes_more_than_was_planned(tmp_path, name):
    loaded = load(tiny_directory(tmp_path, name, context=4096))
    plan = plan_memory(loaded, memory=device(1000 * MB), max_context=2048)
    assert measured_peak(loaded, plan, prompt=1000, streams=16) <= plan.step


@pytest.mark.model
@pytest.mark.parametrize("alias", ["smollm2", pytest.param("gemma3-270m", marks=pytest.mark.slow)])
def test_a_real_models_step_takes_what_was_planned(alias):
    loaded = load(alias)
    plan = plan_memory(loaded)
    peak = measured_peak(loaded, plan, prompt=400, streams=16, length=14)
    assert plan.step / 16 < peak <= plan.step
