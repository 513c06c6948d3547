"""Draft models, heads and adapters with two machines: exactly what one answers, by layers and by heads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.engines.pair import Scenario, run_pair
from support.http.ports import free_port
from support.models.adapters import random_changes, shapes_of, write_mlx_lm, write_peft
from support.models.heads import EAGLE3, HEAD, eagle3_directory, head_directory, with_random_head
from support.models.tiny_directory import tiny_directory

pytestmark = pytest.mark.slow  # two processes that load fourteen models
TRUNK = [(i * 7) % 90 + 3 for i in range(100)]
PROMPTS = [TRUNK, [*TRUNK[:70], 9], [5, 6, 7], [3, 4]]
SPLITS = ["pipeline", "tensor"]
Found = dict[tuple[str, str], dict[str, Any]]


def scenarios(folder: Path) -> dict[str, Scenario]:
    model = tiny_directory(folder / "model", eos=False, context=1024)
    windowed = tiny_directory(folder / "windowed", "mistral", eos=False, context=1024)
    draft = tiny_directory(folder / "draft", eos=False, context=1024)
    head = str(head_directory(folder / "head", HEAD))
    shapes = shapes_of(model)
    adapters = {
        "few": write_mlx_lm(folder / "few", random_changes(shapes, 3, projections=["q_proj", "down_proj"], size=0.4)),
        "last": write_peft(folder / "last", random_changes(shapes, 4, layers=[2], size=0.4)),
        "rows": write_peft(folder / "rows", random_changes(shapes, 5, dora=True, projections=["k_proj", "up_proj"], size=0.4)),
    }

    def scenario(names: list[str | None], eager: bool = False, of: Path = model, **settings: Any) -> Scenario:
        """An adapter, or none, for each prompt."""
        plain = {"max_tokens": 30, "temperature": 0.0, "ignore_eos": True}
        params = [plain if name is None else plain | {"adapter": name} for name in names]
        return Scenario(str(of), PROMPTS, params, {"max_context": 256, "dtype": "float32", **settings}, rounds=2, eager=eager)

    none: list[str | None] = [None] * 4
    greedy = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
    seeded = [{"max_tokens": 40, "temperature": 0.8, "seed": seed, "n": 2, "ignore_eos": True} for seed in (3, 4)]
    crowded = {"max_context": 256, "dtype": "float32", "draft": head, "kv": "4"}
    return {
        "adapters": scenario(["few", "last", "rows", None], adapters={name: str(path) for name, path in adapters.items()}),
        "last": scenario(["last", "last", None, "last"], adapters={"last": str(adapters["last"])}),
        "draft": scenario(none, eager=True, draft=str(draft)),
        "head": scenario(none, eager=True, draft=head),
        # All blocks have a window, and the head has none: its pages are in a group of their own.
        "head without a window": scenario(none, eager=True, of=windowed, draft=head),
        # Its states are taken back where drafts do not hold; the head is in the checkpoint.
        "own head": scenario(none, eager=True, of=with_random_head(folder / "own", eos=False, context=1024), draft="mtp"),
        # It reads the rows that enter each of the three blocks, two of which are on rank 1.
        "eagle 3": scenario(none, eager=True, draft=str(eagle3_directory(folder / "eagle3", EAGLE3))),
        "crowded": Scenario(str(model), PROMPTS, [greedy, *seeded, greedy], crowded, preempts=20, rounds=2, eager=True),
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    given = scenarios(tmp_path_factory.mktemp("drafts"))
    asked = {(name, split): replace(each, split=split) for name, each in given.items() for split in SPLITS}
    del asked["own head", "tensor"]  # blocks of this family cannot be shared
    return dict(zip(asked, run_pair(list(asked.values()), free_port(), 400), strict=True))


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", ["adapters", "last"])  # the last layer is not on rank 0, where it is divided by layers
def test_each_request_gets_its_adapter(found: Found, name: str, split: str) -> None:
    one = found[name, split]
    assert one["tokens"] == one["alone"]["tokens"]
    assert one["reused_tokens"] > 0


@pytest.mark.parametrize("split", SPLITS)
def test_a_draft_model_writes_ahead(found: Found, split: str) -> None:
    one = found["draft", split]
    assert one["tokens"] == one["alone"]["tokens"]
    assert one["accepted_tokens"] == one["drafted_tokens"] > 100


@pytest.mark.parametrize(
    ("name", "split"),
    [("own head", "pipeline"), *((name, split) for name in ("head", "head without a window", "eagle 3", "crowded") for split in SPLITS)],
)
def test_a_head_writes_ahead(found: Found, name: str, split: str) -> None:
    """Of its drafts about as many hold as in one process: sums of shares differ in their last bits."""
    one = found[name, split]
    assert one["tokens"] == one["alone"]["tokens"]
    assert one["drafted_tokens"] > 50
    assert abs(one["accepted_tokens"] - one["alone"]["accepted_tokens"]) <= 5


@pytest.mark.parametrize("split", SPLITS)
def test_a_head_in_a_crowd(found: Found, split: str) -> None:
    """Pages of 4 bits, seeds, samples of one prompt, prefixes that are there, and pages that have to be given back."""
    assert found["crowded", split]["preemptions"] > 0
    assert found["crowded", split]["reused_tokens"] > 0
