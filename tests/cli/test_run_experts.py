"""Commands report the experts that they read from the disk."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.experts.models import SHAPES, make_model

SMALL = replace(SHAPES["qwen3-moe"], layers=2, hidden=256, heads=4, kv_heads=2, head=64, inner=64, experts=32, chosen=4)


@pytest.fixture(scope="module")
def sparse_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model("sparse", tmp_path_factory.mktemp("sparse"), SMALL))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXINFER_HOME", str(tmp_path))


OPTIONS = ("--local", "-t", "0", "--max-tokens", "6", "--ignore-eos", "--experts-memory", "0.0008")


def test_an_object_has_reads_of_experts(call, sparse_model):
    found = json.loads(call("run", sparse_model, "ab", *OPTIONS, "--json").out)
    experts = found["experts"]
    assert experts["slots"] < experts["experts"] == 64
    assert experts["misses"] > 0
    assert experts["bytes_read"] > 0
    assert experts["bytes_read_per_token"] < experts["bytes_read"]
    whole = json.loads(call("run", sparse_model, "ab", *OPTIONS[:-1], "0", "--json").out)
    assert "experts" not in whole
    assert whole["text"] == found["text"]


def test_statistics_are_on_a_line_of_their_own(call, sparse_model):
    result = call("run", sparse_model, "ab", *OPTIONS, "--stats")
    assert "of 64 in memory" in " ".join(result.err.split())
