"""Draft models, heads and adapters with two machines: exactly what one answers, by layers and by heads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.adapters import random_changes, shapes_of, write_mlx_lm, write_peft
from support.heads import HEAD, head_directory
from support.pair import Scenario, free_port, run_pair
from support.tiny_directory import tiny_directory

pytestmark = pytest.mark.slow  # two processes and twelve loads of a model: half a minute
TRUNK = [(i * 7) % 90 + 3 for i in range(100)]
PROMPTS = [TRUNK, [*TRUNK[:70], 9], [5, 6, 7], [3, 4]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_directory(tmp_path_factory.mktemp("model") / "llama", eos=False, context=1024)


def scenario(model: Path, names: tuple[str | None, ...] = (None,) * 4, **settings: Any) -> Scenario:
    """An adapter, or none, for each prompt."""
    plain = {"max_tokens": 30, "temperature": 0.0, "ignore_eos": True}
    params = [plain if name is None else plain | {"adapter": name} for name in names]
    return Scenario(str(model), PROMPTS, params, {"max_context": 256, "dtype": "float32", **settings}, rounds=2)


def found_for(scenario: Scenario) -> list[dict[str, Any]]:
    """By layers, and by heads."""
    return run_pair([scenario, replace(scenario, split="tensor")], free_port())


def test_each_request_gets_its_adapter(model: Path, tmp_path: Path) -> None:
    shapes = shapes_of(model)
    adapters = {
        "few": write_mlx_lm(tmp_path / "few", random_changes(shapes, 3, projections=["q_proj", "down_proj"], size=0.4)),
        "last": write_peft(tmp_path / "last", random_changes(shapes, 4, layers=[2], size=0.4)),
        "rows": write_peft(tmp_path / "rows", random_changes(shapes, 5, dora=True, projections=["k_proj", "up_proj"], size=0.4)),
    }
    for found in found_for(scenario(model, ("few", "last", "rows", None), adapters={name: str(path) for name, path in adapters.items()})):
        assert found["tokens"] == found["alone"]["tokens"]
        assert found["reused_tokens"] > 0


def test_an_adapter_of_layers_that_rank_0_does_not_have(model: Path, tmp_path: Path) -> None:
    path = write_peft(tmp_path / "last", random_changes(shapes_of(model), 4, layers=[2], size=0.4))
    (found,) = run_pair([scenario(model, ("last", "last", None, "last"), adapters={"last": str(path)})], free_port())
    assert found["tokens"] == found["alone"]["tokens"]


def test_a_draft_model_writes_ahead(model: Path, tmp_path: Path) -> None:
    draft = tiny_directory(tmp_path / "draft", eos=False, context=1024)
    for found in found_for(replace(scenario(model, draft=str(draft)), eager=True)):
        assert found["tokens"] == found["alone"]["tokens"]
        assert found["accepted_tokens"] == found["drafted_tokens"] > 100


def test_a_head_writes_ahead_what_it_would_in_one_process(model: Path, tmp_path: Path) -> None:
    """Its drafts depend on the hidden rows of all tokens, also of those that nobody else reads."""
    head = head_directory(tmp_path / "head", HEAD)
    for found in found_for(replace(scenario(model, draft=str(head)), eager=True)):
        assert found["tokens"] == found["alone"]["tokens"]
        assert found["drafted_tokens"] == found["alone"]["drafted_tokens"] > 50
        assert found["accepted_tokens"] == found["alone"]["accepted_tokens"]
