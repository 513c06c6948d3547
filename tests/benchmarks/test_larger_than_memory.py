"""Random models with known routing, and the cap under which they are compared."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import click
import mlx.core as mx
import numpy as np
import pytest

from benchmarks.experts import cap, command
from benchmarks.experts.models import RANGE, ROUTINGS, SHAPES, VOCABULARY, Shape, first_token, make_model
from benchmarks.experts.worker import Ours, walk
from mlxinfer import LLM, SamplingParams
from mlxinfer.loading.load import load, meta_model
from mlxinfer.models.decoder import Model

SMALL = {
    "qwen3-moe": replace(SHAPES["qwen3-moe"], layers=2, hidden=256, heads=4, kv_heads=2, head=64, inner=64, experts=32, chosen=4),
    "gpt-oss": replace(SHAPES["gpt-oss"], layers=2, hidden=256, heads=4, kv_heads=2, inner=64, experts=16),
    "glm": replace(SHAPES["glm"], layers=3, hidden=256, heads=4, kv_heads=2, inner=128, experts=16, chosen=4, dense=256),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("experts")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXINFER_HOME", str(tmp_path))


@pytest.mark.parametrize("name", SMALL)
def test_a_greedy_answer_walks_through_its_range(name, folder):
    path = make_model(name, folder, SMALL[name])
    assert make_model(name, folder) == path  # it is there
    found = meta_model(path)
    assert len(found.expert_layers) == SMALL[name].sparse_layers
    assert {(layer.experts, layer.chosen) for layer in found.expert_layers} == {(SMALL[name].experts, SMALL[name].chosen)}
    for share in (0, 0.6):
        gigabytes = share * sum(layer.nbytes for layer in found.expert_layers) / 1e9
        with LLM(path, speculate=False, prefix_cache=False, experts_memory=gigabytes) as llm:
            for routing in ROUTINGS:
                first = first_token(routing)
                asked = [first + RANGE - 2]
                answer = llm.generate([asked], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))[0]
                assert answer.token_ids == [first + RANGE - 1, first, first + 1, first + 2]
            assert (llm.stats().expert_misses > 0) == (share > 0)


def chosen_experts(shape: Shape, path: Path, routing: str) -> np.ndarray:
    """Experts of the first sparse layer for the tokens of a range, as the embeddings choose them: int `[RANGE, chosen]`."""
    model: Model = load(path, dtype="float32").model
    layer = next(block for block in model.blocks if hasattr(getattr(block, "mlp", None), "route")).mlp
    tokens = mx.array(walk(first_token(routing), 0, RANGE))
    rows = model.embedding(tokens) if callable(model.embedding) else model.embed(tokens)
    rows = rows * mx.rsqrt((rows * rows).mean(axis=-1, keepdims=True))
    return np.array(layer.route(layer.router(rows))[0])


def shared(chosen: np.ndarray) -> float:
    """Mean share of a token's experts that the token before it chose too."""
    pairs = pairwise(chosen)
    return float(np.mean([len(set(a) & set(b)) / len(a) for a, b in pairs]))


def test_routings_differ_as_they_say(folder):
    shape = SMALL["qwen3-moe"]
    path = make_model("qwen3-moe", folder, shape)
    found = {routing: chosen_experts(shape, path, routing) for routing in ROUTINGS}
    counts = {routing: np.sort(np.bincount(each.flatten(), minlength=shape.experts))[::-1] for routing, each in found.items()}
    eighth = {routing: each[: shape.experts // 8].sum() / each.sum() for routing, each in counts.items()}
    assert eighth["uniform"] < 0.25 < eighth["zipf"]
    assert shared(found["uniform"]) < 0.25
    assert shared(found["sticky"]) > 0.4
    assert shared(found["sticky"]) > shared(found["zipf"])


def test_ranges_do_not_overlap():
    assert [first_token(routing) for routing in ROUTINGS] == [RANGE, 2 * RANGE, 3 * RANGE]
    assert walk(RANGE, RANGE - 1, 3) == [2 * RANGE - 1, RANGE, RANGE + 1]
    assert VOCABULARY == 4 * RANGE


def test_a_worker_measures_what_it_says(folder):
    path = make_model("gpt-oss", folder, SMALL["gpt-oss"])
    ours = Ours()
    loaded = ours.load(str(path), threads=1, share=0.6)
    assert loaded["pools"] < sum(layer.nbytes for layer in meta_model(path).expert_layers)
    decode = ours.decode(first_token("zipf"), warm=3, steps=5)
    assert (decode["steps"], decode["right"]) == (5, 1.0)
    assert decode["hits"] + decode["misses"] > 0
    assert ours.prefill(first_token("sticky"), 20)["tokens"] == 20
    if sys.platform == "linux":
        assert ours.memory()["peak_rss"] > 0


def test_a_cap_is_below_the_group_of_this_process(tmp_path, monkeypatch):
    files = {"memory.max": "max", "memory.current": "10", "memory.peak": "30", "memory.stat": "anon 1\nswap 2\n", "cgroup.procs": ""}
    made = Path.mkdir

    def mkdir(path: Path, *arguments: object, **options: object) -> None:
        made(path, *arguments, **options)
        for name, text in files.items():
            (path / name).write_text(text)

    monkeypatch.setattr(cap, "memory_groups", lambda: iter([(tmp_path, 2)]))
    monkeypatch.setattr(Path, "mkdir", mkdir)
    with cap.MemoryCap() as group:
        group.set(1000)
        (own,) = tmp_path.iterdir()
        assert (own / "memory.max").read_text() == "1000"
        assert (group.usage(), group.peak(), group.swapped()) == (10, 30, 2)
        assert group.command(["true"])[-1] == "true"
        assert str(own) in group.command(["true"])
        for file in own.iterdir():
            if file.name != "cgroup.procs":
                file.unlink()
    monkeypatch.setattr(cap, "memory_groups", lambda: iter(()))
    with pytest.raises(OSError, match="no control groups"):
        cap.MemoryCap()


def test_the_read_ahead_of_a_disk_is_found_or_unknown(tmp_path):
    found = cap.read_ahead(tmp_path)
    assert found is None or found >= 0


def case(engine: str, share: float, seconds: float, nbytes: int) -> command.Case:
    decode = {"steps": 10, "seconds": seconds, "bytes": nbytes, "right": 1.0}
    decode |= {"hits": 3, "misses": 1} if engine == "mlxinfer" else {}
    memory = {"peak_rss": 10**9, "swap": 0}
    prefill = {"tokens": 100, "seconds": 10 * seconds}
    return command.Case(
        shape="glm", share=share, engine=engine, routing="zipf", decode=decode, prefill=prefill, memory=memory, load={}, cap=1, disk=1e9
    )


def test_the_table_says_how_far_a_rate_is_from_the_possible():
    cases = [case("mlxinfer", 1.0, 1.0, 0), case("mlxinfer", 0.5, 4.0, 2 * 10**9), case("llama.cpp", 0.5, 10.0, 5 * 10**9)]
    lines = command.table(cases).splitlines()
    assert "| glm | 50% | zipf | mlxinfer | 2.50 | 2.5 | 200 | 500 | 50% | 50% | 75% | 1.00 | 0 |" in lines
    assert "| glm | 50% | zipf | llama.cpp | 1.00 | 1.0 | 500 | 500 | 50% | 50% |  | 1.00 | 0 |" in lines
    assert lines[-1] == "- glm, 50%, zipf: 2.50x llama.cpp in decoding, 2.50x in prefill"
    json.dumps([command.asdict(each) for each in cases])


def test_percentages_are_checked():
    assert command._shares(None, None, "100,30") == [1.0, 0.3]
    for wrong in ("0", "101", "a"):
        with pytest.raises(click.BadParameter):
            command._shares(None, None, wrong)
    assert os.environ["MLXINFER_HOME"]
