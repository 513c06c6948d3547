"""Experts in pools: every answer is, token for token, that of the model with all experts in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.engines.sparse_tiny import FAMILIES, FORMS, sparse_tiny

from mlxinfer import LLM, SamplingParams
from mlxinfer import kernels_cpu as kernels
from mlxinfer.kernels_cpu import native

GREEDY = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
LONG = [(i * 7) % 90 + 3 for i in range(100)]
PROMPTS = [LONG, [5, 6, 7], [*LONG[:70], 9], [3, 4]]
LITTLE = 1e-6
"""GB of pools: as few slots as there can be."""
PATHS = ["kernels", "plain"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXINFER_HOME", str(tmp_path_factory.getbasetemp() / "home"))


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run with the CPU kernels, or in plain MLX as on a GPU."""
    if request.param == "plain":
        monkeypatch.setattr(native, "_loaded", lambda: native._Loaded(None, "switched off"))
    elif not kernels.can_run_waves():
        pytest.skip(kernels.status())
    return str(request.param)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    known: dict[tuple[str, str], Path] = {}

    def find(family: str, form: str) -> Path:
        if (family, form) not in known:
            known[family, form] = sparse_tiny(tmp_path_factory.mktemp("sparse") / family, family, form)
        return known[family, form]

    return find


def generate(llm: LLM, prompts: list[list[int]] = PROMPTS, **params: Any) -> list[Any]:
    found = llm.generate(prompts, SamplingParams(**(GREEDY | params)))
    return [(answer.token_ids, answer.finish_reason) for answer in found]


def both(model: Path, use: Callable[[LLM], Any], **settings: Any) -> Any:
    """Return what `use` returns of the resident model, after a comparison with the same of the model with the fewest slots."""
    found = []
    for memory in (0, LITTLE):
        llm = LLM(str(model), experts_memory=memory, **{"max_context": 256, **settings})
        try:
            if memory:
                pools = llm.loaded.experts
                assert pools is not None
                pools.resize_to(0)
            found.append(use(llm))
            if memory:
                stats = pools.store.stats()
                assert stats.slots == 2 * len(pools.store.pools)
                assert stats.misses > 0
        finally:
            llm.close()
    assert found[1] == found[0]
    return found[0]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_the_resident_model(directory, family: str, form: str, path: str) -> None:
    found = both(directory(family, form), generate)
    assert all(len(tokens) == 12 for tokens, _ in found)
