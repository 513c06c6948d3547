"""Routed experts stay in a file if they do not fit: the plan covers dense weights, pools and everything else."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines.tiny_engine import GOLDEN, tiny_model
from support.models.planned import MB, Tiny
from support.processes.examples import examples

from mlxinfer.config import EngineArgs
from mlxinfer.errors import MemoryPlanError, SettingError
from mlxinfer.loading.load import meta_model
from mlxinfer.loading.memory.experts import EXPERTS_MEMORY, ExpertDemand, ExpertLayer, expert_demand, layers_in
from mlxinfer.loading.memory.plan import plan_memory
from mlxinfer.models.pipeline_stage import Stage
from mlxinfer.util.device import DeviceMemory
from mlxinfer.util.uncached_file import PAGE

DENSE = 20 * MB


def device(size: int) -> DeviceMemory:
    return DeviceMemory(2 * size, size)


def layers(count: int = 4, experts: int = 64, chosen: int = 4, record: int = MB // 2) -> tuple[ExpertLayer, ...]:
    return tuple(
        ExpertLayer(key=f"model.layers.{i}.mlp.experts", experts=experts, chosen=chosen, nbytes=experts * record) for i in range(count)
    )


def sparse(found: tuple[ExpertLayer, ...]) -> Tiny:
    return Tiny(tiny_model("mixtral"), weight_bytes=DENSE + sum(layer.nbytes for layer in found), load_bytes=4 * MB)


@pytest.mark.parametrize(
    ("family", "key", "experts", "chosen"),
    [
        ("qwen3_moe", "model.layers.1.mlp.switch_mlp", 6, 2),
        ("gpt_oss", "model.layers.0.mlp.experts", 4, 2),
        ("glm4_moe", "model.layers.1.mlp.switch_mlp", 6, 2),
        ("gemma4_text_experts", "model.layers.0.experts.switch_glu", 4, 2),
        ("nemotron_h_experts", "backbone.layers.1.mixer.switch_mlp", 4, 2),
    ],
)
def test_headers_name_the_routed_experts(family, key, experts, chosen):
    found = meta_model(GOLDEN / family)
    first = found.expert_layers[0]
    assert (first.key, first.experts, first.chosen) == (key, experts, chosen)
    assert 0 < sum(layer.nbytes for layer in found.expert_layers) < found.weight_bytes
    assert len({layer.key for layer in found.expert_layers}) == len(found.expert_layers)


def test_a_dense_model_has_none():
    assert meta_model(GOLDEN / "llama").expert_layers == ()
    assert expert_demand((), "auto") is None


def test_a_part_of_a_model_has_the_experts_of_its_blocks():
    found = meta_model(GOLDEN / "gpt_oss")
    outline = found.outline(Stage(1, 3))
    assert [layer.key for layer in layers_in(outline, found.expert_layers)] == ["model.layers.1.mlp.experts", "model.layers.2.mlp.experts"]
    part = found.of_part(Stage(1, 3), outline, 1)
    assert part.expert_layers == layers_in(outline, found.expert_layers)
    assert found.of_part(Stage(0, 3, share=1, shares=2), found.model, 1).expert_layers == ()


@given(size=st.integers(40, 400), experts=st.integers(2, 96), chosen=st.integers(1, 8), wanted=st.none() | st.integers(1, 200))
@settings(max_examples=examples(60))
def test_pools_and_everything_else_fit(size, experts, chosen, wanted):
    found = layers(experts=experts, chosen=min(chosen, experts))
    model, demand = sparse(found), ExpertDemand(layers=found, wanted=wanted and wanted * MB)
    try:
        plan = plan_memory(model, experts=demand, memory=device(size * MB))
    except MemoryPlanError:
        return
    assert plan.used <= plan.limit == size * MB
    if plan.experts is None:
        assert plan.weights == model.weight_bytes
        return
    pools = plan.experts
    assert pools.dense == DENSE
    assert plan.weights == DENSE + pools.pools
    assert wanted is None or pools.pools <= max(wanted * MB, demand.least)
    for layer in pools.layers:
        assert min(layer.experts, 2 * layer.chosen) <= layer.slots <= layer.experts
    assert 0 <= pools.hit_rate() <= 1
    assert pools.token_bytes() <= pools.chosen_bytes


def test_auto_keeps_all_experts_where_they_fit():
    found = layers()
    whole = plan_memory(sparse(found), memory=device(300 * MB))
    assert plan_memory(sparse(found), experts=expert_demand(found, "auto"), memory=device(300 * MB)) == whole
    assert whole.experts is None


def test_auto_gives_pools_what_a_good_context_leaves():
    found = layers()
    with pytest.raises(MemoryPlanError):
        plan_memory(sparse(found), memory=device(110 * MB))
    plan = plan_memory(sparse(found), experts=expert_demand(found, "auto"), memory=device(110 * MB))
    more = plan_memory(sparse(found), experts=expert_demand(found, "auto"), memory=device(130 * MB))
    assert plan.experts
    assert more.experts
    assert plan.experts.slots.keys() == {layer.key for layer in found}
    assert 0.3 < plan.experts.resident_share < more.experts.resident_share < 1
    assert plan.experts.token_bytes() > more.experts.token_bytes()


def test_a_given_number_of_gigabytes_bounds_the_pools():
    found = layers()
    plan = plan_memory(sparse(found), experts=expert_demand(found, 0.04), memory=device(10**9))
    assert plan.experts
    assert 0.03e9 < plan.experts.pools <= 0.04e9
    assert plan_memory(sparse(found), experts=expert_demand(found, 1.0), memory=device(10**9)).experts is None
    assert expert_demand(found, 0) is None


def test_the_environment_replaces_auto_only(monkeypatch):
    found = layers()
    monkeypatch.setenv(EXPERTS_MEMORY, "0.05")
    for wanted in (None, "auto"):
        demand = expert_demand(found, wanted)
        assert demand
        assert demand.wanted == 50_000_000
    assert expert_demand(found, 2.0).wanted == 2 * 10**9
    monkeypatch.setenv(EXPERTS_MEMORY, "0")
    assert expert_demand(found, "auto") is None


def test_the_refusal_says_that_experts_on_disk_do_not_help():
    found = layers()
    with pytest.raises(MemoryPlanError) as caught:
        plan_memory(sparse(found), experts=expert_demand(found, "auto"), memory=device(30 * MB))
    message = str(caught.value)
    assert "with its experts read from the disk" in message
    assert "weights without experts 0.021" in message
    assert "slots for experts 0.0168" in message
    assert "\n" not in message


def test_one_layer_at_a_time_is_read():
    found = layers(count=1, experts=100, record=MB)
    with pytest.raises(MemoryPlanError, match=r"reading them"):  # 20 + 2 * 100 MiB
        plan_memory(sparse(found), experts=expert_demand(found, 0.01), memory=device(210 * MB))
    assert plan_memory(sparse(found), experts=expert_demand(found, 0.01), memory=device(230 * MB)).experts


def test_rates_and_bytes_of_a_token():
    demand = ExpertDemand(layers=layers(count=2, experts=64, chosen=4, record=PAGE + 1))
    pools = demand.pooled(demand.nbytes // 2, 0)
    assert list(pools.slots.values()) == [32, 32]
    assert pools.hit_rate() == pytest.approx(0.25 + 0.75 / 2)
    assert pools.chosen_bytes == 2 * 4 * 2 * PAGE
    assert pools.token_bytes() == int(pools.chosen_bytes * (1 - pools.hit_rate()))
    assert (pools.token_bytes(1.0), pools.token_bytes(0.0)) == (0, pools.chosen_bytes)


@pytest.mark.parametrize("value", ["auto", None, 0, 4, 2.5])
def test_values_of_the_setting(value):
    assert EngineArgs("m", experts_memory=value).experts_memory == value


@pytest.mark.parametrize("value", ["most", -1, float("nan"), True])
def test_other_values_are_refused(value):
    with pytest.raises(SettingError, match=r"experts_memory must be auto, or a number of at least 0 and at most 1000000 GB"):
        EngineArgs("m", experts_memory=value)
