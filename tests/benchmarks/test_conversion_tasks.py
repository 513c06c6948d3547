"""Tasks of lm-eval before and after a conversion."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.models.tiny_directory import tiny_directory

from benchmarks.conversions import likelihoods
from benchmarks.conversions.likelihoods import log_likelihoods
from benchmarks.conversions.tasks import TASKS, WAYS, jobs, kept, measure_tasks, table, write_tasks
from mlxinfer import LLM


@pytest.fixture
def bigbench(tmp_path: Path) -> Path:
    examples = [{"input": f"ab{n} ", "target_scores": {"b": n % 2, " a": 1 - n % 2}} for n in range(9)]
    data = json.dumps({"example_input_prefix": "\nq ", "examples": examples}).encode()
    archive = tmp_path / "bigbench.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for place in TASKS.values():
            info = tarfile.TarInfo(f"bigbench-1/bigbench/benchmark_tasks/{place}/task.json")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return archive


def test_contexts_are_read_once_and_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(likelihoods, "_ROWS", 90)
    model, rng = tiny_directory(tmp_path / "model", "mistral", eos=False), np.random.default_rng(0)
    contexts = [tuple(map(int, rng.integers(1, 20, size))) for size in (3, 70, 64, 1)]
    pairs = [(context, tuple(map(int, rng.integers(1, 20, size)))) for context in contexts for size in (1, 4, 66)]
    with LLM(model, dtype="float32", max_context=256) as llm:
        found = log_likelihoods(llm.loaded.model, [*pairs, pairs[0]])
        likeliest = int(mx.argmax(llm.logits(contexts[0])[-1]).item())
        assert log_likelihoods(llm.loaded.model, [(contexts[0], (likeliest,))])[0][1]
        for (context, ids), (value, greedy) in zip(pairs, found, strict=False):
            logits = np.array(llm.logits([*context, *ids]), np.float64)[len(context) - 1 : -1]
            logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            assert value == pytest.approx(logprobs[np.arange(len(ids)), list(ids)].sum(), abs=1e-3)
            assert greedy == (logits.argmax(-1) == ids).all()
    assert found[-1] == found[0]


def test_items_are_drawn_from_the_archive(tmp_path: Path, bigbench: Path) -> None:
    write_tasks(bigbench, tmp_path / "tasks", 4)
    for name in TASKS:
        items = [json.loads(line) for line in (tmp_path / "tasks" / f"{name}.jsonl").read_text().splitlines()]
        assert len({item["text"] for item in items}) == 4
        for item in items:
            number = int(item["text"].removeprefix("q ab").removesuffix("\nA:"))
            assert item["choices"] == ["b", "a"]
            assert item["gold"] == 1 - number % 2
    write_tasks(bigbench, tmp_path / "again", 4)
    assert (tmp_path / "again" / "social_iqa.jsonl").read_text() == (tmp_path / "tasks" / "social_iqa.jsonl").read_text()
    with tarfile.open(tmp_path / "empty.tar", "w"):
        pass
    with pytest.raises(KeyError, match="goal_inference"):
        write_tasks(tmp_path / "empty.tar", tmp_path, 4)


def test_differences_are_those_of_the_same_items() -> None:
    def row(way: str, right: str) -> dict:
        return {"model": "m", "way": way, "right": {name: {"acc_norm": right, "acc": right} for name in TASKS}}

    text = table([row("source", "1010"), row("mlxinfer fit: 4 bits", "1000")])
    source, other = text.strip().splitlines()[-2:]
    assert "| 50.0% ± 28.9% |" in source
    assert "| -25.0% ± 13.1% | 75.0% |" in other


def test_every_model_is_a_process_after_what_it_is_made_of(tmp_path: Path) -> None:
    listed = jobs({"m": tmp_path}, tmp_path / "a.tar", tmp_path, 10, 2)
    names = [job.name for job in listed]
    assert names[:5] == ["m source", "m teacher", "m samples 0", "m samples 1", "m importance"]
    assert [job.needs for job in listed[5:]] == [("m source",), *[("m importance",)] * (len(WAYS) - 1)]


@pytest.mark.long
def test_lm_eval_asks_the_model(tmp_path: Path, bigbench: Path) -> None:
    pytest.importorskip("lm_eval")
    model = tiny_directory(tmp_path / "m", "mistral", eos=False)
    found = measure_tasks("m", model, "source", bigbench, tmp_path, 5)
    assert kept(tmp_path) == [found]
    assert all(len(right["acc"]) == 5 for right in found["right"].values())
    assert found["figures"]["social_iqa"]["acc"] == found["right"]["social_iqa"]["acc"].count("1") / 5
