from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.engines.tiny_engine import GOLDEN, tiny_model
from support.models.checkpoints import config_of, random_checkpoint

from mlxinfer.bench.roofline import Cost, Footprint, WeightSize, _Attention, footprint
from mlxinfer.loading.load import load

sizes = st.integers(1, 200)


@given(window=st.none() | st.integers(1, 50), past=st.integers(0, 200), count=sizes)
def test_attention_counts_what_each_token_sees(window: int | None, past: int, count: int) -> None:
    visible = [range(0 if window is None else max(p + 1 - window, 0), p + 1) for p in range(past, past + count)]
    read = {k for span in visible for k in span if k < past}
    cost = _Attention(window, token_bytes=10.0, pair_operations=7).step(past, count)
    assert cost == Cost(10.0 * (len(read) + count), 7 * sum(map(len, visible)))


def made_up(**changes: object) -> Footprint:
    values = {
        "body": WeightSize(1000, 400), "head": WeightSize(300, 100), "experts": WeightSize(0, 0), "chosen": 0.0,
        "attention": (_Attention(None, 2.0, 3),), "state_bytes": 0,
    }  # fmt: skip
    return Footprint(**(values | changes))


def test_a_step_of_decoding_reads_the_weights_once_and_every_past() -> None:
    assert made_up().decode(depth=9, streams=1) == Cost(1000 + 300 + 2 * 10, 2 * 500 + 3 * 10)
    assert made_up().decode(depth=9, streams=4) == Cost(1000 + 300 + 4 * 2 * 10, 4 * (2 * 500 + 3 * 10))
    assert made_up(state_bytes=50).decode(depth=9, streams=4).bytes == 1000 + 300 + 4 * (2 * 10 + 100)


@given(tokens=sizes, chunk=sizes)
def test_prefill_reads_the_weights_once_a_chunk_and_makes_logits_once(tokens: int, chunk: int) -> None:
    cost = made_up(attention=()).prefill(tokens, chunk)
    assert cost == Cost(-(-tokens // chunk) * 1000 + 300, 2 * (tokens * 400 + 100))
    whole, cut = (made_up().prefill(tokens, length).operations for length in (tokens, chunk))
    assert whole == cut


def test_experts_are_read_as_far_as_they_are_chosen() -> None:
    mixture = made_up(experts=WeightSize(8000, 800), chosen=0.25)
    assert mixture.decode(0, 1).bytes == pytest.approx(1000 + 300 + 0.25 * 8000 + 2)
    assert mixture.decode(0, 2).bytes == pytest.approx(1000 + 300 + (1 - 0.75**2) * 8000 + 4)
    assert mixture.decode(0, 1).operations == pytest.approx(2 * (400 + 100 + 200) + 3)


def test_the_sizes_of_a_model() -> None:
    config = json.loads((GOLDEN / "llama" / "config.json").read_text())
    model = tiny_model("llama")
    found = footprint(model, config, mx.float32)
    assert found is not None
    hidden, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    heads, kv, dim = config["num_attention_heads"], config["num_key_value_heads"], model.layers[0].key_dim
    block = hidden * dim * (2 * heads + 2 * kv) + 3 * hidden * inner
    assert found.body.parameters == layers * block
    assert found.body.nbytes == 4 * (layers * (block + 2 * hidden) + hidden)
    assert found.head == WeightSize(4 * config["vocab_size"] * hidden, config["vocab_size"] * hidden)
    assert found.attention == (_Attention(None, 4.0 * 2 * kv * dim, 4 * heads * dim),) * layers
    assert (found.experts, found.chosen, found.state_bytes) == (WeightSize(0, 0), 0.0, 0)


def test_windows_experts_and_states_are_found(tmp_path: Path) -> None:
    windows = footprint(tiny_model("gemma3_text"), {}, mx.float32)
    assert windows is not None
    assert {layer.window is None for layer in windows.attention} == {True, False}
    config = config_of("qwen3_moe", mlp_only_layers=[])
    loaded = load(random_checkpoint(tmp_path / "moe", config), dtype="float32", bits=4, group_size=64)
    mixture = footprint(loaded.model, loaded.config, loaded.dtype)
    assert mixture is not None
    experts, layers = config["num_local_experts"], config["num_hidden_layers"]
    assert mixture.chosen == config["num_experts_per_tok"] / experts
    assert mixture.experts.parameters == layers * experts * 3 * config["hidden_size"] * config["moe_intermediate_size"]
    assert mixture.experts.nbytes == mixture.experts.parameters * (4 + 2 * 32 / 64) / 8
    recurrent = footprint(tiny_model("qwen3_next"), {}, mx.float32)
    assert recurrent is not None
    assert recurrent.state_bytes > 0
