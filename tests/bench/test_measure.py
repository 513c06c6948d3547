from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.engines.tiny_engine import tiny_engine
from support.models.checkpoints import config_of, random_checkpoint
from support.models.tiny_directory import tiny_directory

from mlxinfer import LLM, SamplingParams
from mlxinfer.bench import measure as measuring
from mlxinfer.bench.machine import Machine
from mlxinfer.bench.measure import Bench, Measurement, Workload, measure
from mlxinfer.bench.roofline import Cost
from mlxinfer.engine.core.engine import Engine
from mlxinfer.engine.core.sequence import Sequence

FOREVER = Workload(prefill=(5, 70), depths=(0, 65), batches=(1, 3), repeat=2, steps=6, max_seconds=0)
LLAMA = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[LLM]:
    with LLM(tiny_directory(tmp_path / "tiny")) as llm:
        yield llm


@pytest.fixture
def borrowed(tmp_path: Path) -> Iterator[LLM]:
    """A model whose past cannot be shared, because mlx-lm keeps it."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.models.stablelm import Model, ModelArgs

    config = {"model_type": "stablelm", "norm_eps": 1e-5, "layer_norm_eps": 1e-5, "vocab_size": 64, "rope_theta": 1e4, "rope_pct": 0.25}
    config |= LLAMA | {"use_qkv_bias": True, "qk_layernorm": False, "partial_rotary_factor": 0.5, "max_position_embeddings": 128}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), dict(tree_flatten(Model(ModelArgs.from_dict(config)).parameters())))
    (tmp_path / "config.json").write_text(json.dumps(config))
    with LLM(tmp_path) as llm:
        yield llm


def pages_in_use(engine: Engine) -> int:
    return engine.cache.usage().used


@pytest.mark.parametrize("depth", [0, 1, 63, 64, 100])
def test_sequences_are_held_still_and_decoded_from_the_same_place(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, seen = tiny_engine(), list[list[Sequence]]()
    bench = Bench(engine)
    monkeypatch.setattr(bench, "_end", lambda sequences: (seen.append(sequences), Bench._end(bench, sequences)))
    with bench.filled(depth, 3, 10) as held:
        before = [list(s.tokens) for s in held]
        assert all(max(depth, 1) <= s.num_computed_tokens <= max(depth, 1) + 2 for s in held)
        assert len({tuple(s.prompt) for s in held}) == 3 or depth <= 1
        assert all(bench.decode(held[:2], 10) > 0 for _ in range(2))
        assert bench.decode(held, 4) > 0
        assert [s.tokens for s in held] == before
    first, second, third, _ = seen
    for once, again in zip(first, second, strict=True):  # a right draft may bring one of them more tokens than were asked for
        both = min(len(once.tokens), len(again.tokens))
        assert both >= max(depth, 1) + 10
        assert once.tokens[:both] == again.tokens[:both]
    for base, copy in zip(before, third, strict=True):
        assert copy.tokens[: len(base)] == base
        assert len(copy.tokens) >= len(base) + 6
    assert engine.idle
    assert pages_in_use(engine) == 0


def test_what_is_decoded_is_what_a_request_gets(llm: LLM) -> None:
    """The copies run on the real engine: their tokens are those of a greedy answer to the same prompt."""
    bench = Bench(llm.engine)
    with bench.filled(70, 2, 20) as held:
        copies = [bench._copy(s) for s in held]
        for copy in copies:
            llm.engine.scheduler.run(copy)
        bench._advance(copies, 12)
        bench._end(copies)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for base, copy in zip(held, copies, strict=True):
        assert copy.tokens[70:82] == llm.generate([base.prompt], params)[0].token_ids


def test_prefill_leaves_nothing_behind() -> None:
    engine = tiny_engine()
    assert Bench(engine).prefill(200) > 0
    assert engine.idle
    assert pages_in_use(engine) == 0


def test_a_plan_gives_its_rows(llm: LLM) -> None:
    told: list[str] = []
    rows = list(measure(llm, FOREVER, told.append))
    assert [row.name for row in rows] == ["prefill 5", "prefill 70", "decode 0 x1", "decode 0 x3", "decode 65 x1", "decode 65 x3"]
    assert all(len(row.rates) == 2 and min(row.rates) > 0 and row.left_out is None for row in rows)
    assert [row.tokens for row in rows] == [5, 70, 6, 6, 6, 6]
    assert all(row.cost is not None and row.cost.bytes > 0 for row in rows)
    costs = [row.cost.bytes for row in rows if row.cost]
    assert costs[0] < costs[1]
    assert costs[2] < costs[4] < costs[5]
    assert "prefill 70: 2 of 2" in told


@pytest.mark.long
def test_models_of_mlx_lm_are_measured_without_costs(borrowed: LLM) -> None:
    rows = list(measure(borrowed, FOREVER, lambda _: None))
    assert [row.cost for row in rows] == [None] * 6
    assert all(len(row.rates) == 2 for row in rows)
    assert borrowed.engine.idle


def test_other_graphs_are_measured(tmp_path: Path) -> None:
    with LLM(random_checkpoint(tmp_path / "hybrid", config_of("qwen3_next"))) as llm:
        rows = list(measure(llm, replace(FOREVER, batches=(2,)), lambda _: None))
    assert all(row.rates and row.cost for row in rows)


def test_what_cannot_be_measured_is_left_out_with_its_reason(llm: LLM) -> None:
    plan = Workload(prefill=(256,), depths=(0, 240), batches=(1, 17), repeat=1, steps=10, max_seconds=0)
    reasons = {row.name: row.left_out for row in measure(llm, plan, lambda _: None)}
    context = "does not fit in the context of 256 tokens"
    assert reasons == {
        "prefill 256": context,
        "decode 0 x1": None,
        "decode 0 x17": "at most 16 sequences run together",
        "decode 240 x1": context,
        "decode 240 x17": context,
    }


def test_a_cache_that_is_too_small_leaves_a_batch_out() -> None:
    bench = Bench(tiny_engine(kv_cache_tokens=256))
    assert bench.fits(50, 1, 10)
    assert not bench.fits(130, 2, 10)


def test_time_limits_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Workload(repeat=5, max_seconds=10)
    times = iter([3.0, 3.0, 3.0, 3.0, 3.0])
    assert measuring._samples(plan, "", lambda: next(times), lambda _: None) == [3.0, 3.0, 3.0]
    assert measuring._samples(plan, "", lambda: 11.0, lambda _: None) == [11.0]
    assert measuring._samples(replace(plan, max_seconds=0), "", lambda: 11.0, lambda _: None) == [11.0] * 5
    bench = Bench(tiny_engine())
    assert measuring._prefill_row(bench, plan, 200, speed=10.0, tell=lambda _: None).left_out == "takes about 20 s"
    rows = list(measuring._decode_rows(bench, replace(plan, batches=(1, 2)), 60, speed=10.0, tell=lambda _: None))
    assert [row.left_out for row in rows] == [None, "takes about 12 s to fill the cache"]
    monkeypatch.setattr(bench, "decode", lambda held, steps: 1.0 * steps)
    (row,) = measuring._decode_rows(bench, replace(plan, batches=(1,), max_seconds=40), 0, speed=10.0, tell=lambda _: None)
    assert (row.tokens, row.rates) == (8, (1.0,) * 5)


def test_shares_of_the_machine() -> None:
    machine = Machine("", 1, 0, read_bytes=100.0, copy_bytes=0.0, operations=1000.0, operations_dtype="")
    row = Measurement(work="decode", tokens=8, depth=0, batch=2, rates=(1.0, 4.0, 2.0), cost=Cost(50.0, 100.0))
    assert (row.rate, row.seconds) == (2.0, 1.0)
    shares = row.against(machine)
    assert shares is not None
    assert (shares.bandwidth, shares.operations, shares.limit) == (0.5, 0.1, "memory")
    prompt = Measurement(work="prefill", tokens=8, depth=0, batch=1, rates=(4.0,), cost=Cost(50.0, 1000.0))
    shares = prompt.against(machine)
    assert shares is not None
    assert (prompt.seconds, shares.bandwidth, shares.operations, shares.limit) == (2.0, 0.25, 0.5, "arithmetic")
    assert replace(row, cost=None).against(machine) is None
    assert replace(row, rates=()).against(machine) is None
