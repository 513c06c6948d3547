"""Each engine on a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.models.tiny_directory import tiny_directory

from benchmarks.engines import MODULES, create
from benchmarks.engines.base import Engine, random_tokens

PROMPT = "The capital"


@pytest.fixture
def ours(tmp_path: Path) -> Engine:
    engine = create("mlxinfer")
    engine.load(str(tiny_directory(tmp_path / "tiny")), threads=1, context=200, prompt=PROMPT)
    return engine


def works(engine: Engine, *, streams: int) -> None:
    assert engine.prefill(40)["seconds"] > 0
    for _ in range(2):
        assert engine.decode(0, 1, 5)["seconds"] > 0
        assert engine.decode(30, 1, 5)["seconds"] > 0
        assert engine.decode(0, streams, 5)["seconds"] > 0
    about = engine.about()
    assert about["version"]
    assert about["weight_bytes"] > 10_000
    assert about["cache_item_bytes"] in (2, 4)


def test_ours(ours: Engine) -> None:
    works(ours, streams=4)


def test_our_costs_have_their_parts(ours: Engine) -> None:
    shallow, deep = ours.cost(tokens=0, depth=10, streams=1), ours.cost(tokens=0, depth=20, streams=1)
    assert shallow["weight_bytes"] == deep["weight_bytes"] == pytest.approx(ours.about()["weight_bytes"], rel=0.1)
    assert deep["cache_bytes"] == pytest.approx(shallow["cache_bytes"] * 21 / 11)
    assert ours.cost(tokens=64, depth=0, streams=1)["operations"] > 50 * shallow["operations"]


@pytest.mark.long
def test_mlx_lm(tmp_path: Path) -> None:
    engine = create("mlx-lm")
    text = engine.load(str(tiny_directory(tmp_path / "tiny")), threads=1, context=200, prompt=PROMPT)
    assert text == create("mlxinfer").load(str(tmp_path / "tiny"), threads=1, context=200, prompt=PROMPT)
    works(engine, streams=2)


@pytest.mark.model
def test_llama_cpp() -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed (pip install '.[bench]')")
    from mlxinfer.loading.find.resolve import resolve

    engine = create("llama.cpp")
    assert engine.load(str(resolve("smollm2").path), threads=1, context=100, prompt="The capital of France is") == {"text": " Paris"}
    works(engine, streams=3)


def test_every_name_has_a_module() -> None:
    folder = Path(create.__code__.co_filename).parent
    assert all((folder / f"{module}.py").is_file() for module in MODULES.values())


def test_prompts_are_the_same_in_every_engine() -> None:
    assert random_tokens(5, 100) == random_tokens(5, 100)
    assert len(set(random_tokens(500, 100))) > 90
    assert max(random_tokens(500, 100)) < 100
