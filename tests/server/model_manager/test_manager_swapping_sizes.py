"""Several models with different sizes and settings."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.http.kept_models import kept_models, tiny_models


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return tiny_models(tmp_path_factory.mktemp("several"), "abc")


def test_it_is_bytes_that_count_and_not_models(paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two small models fit together; a large model takes the memory of both."""
    memory = 60_000_000
    with kept_models(paths, memory, contexts={"a": 64, "b": 64}) as kept:
        assert [kept.ask(name)[0] for name in "ab"] == [200, 200]
        assert kept.states() == {"a": "ready", "b": "ready", "c": "listed"}
        monkeypatch.setattr(kept.live.served.manager.room, "need", lambda args: 50_000_000)
        assert kept.ask("c")[0] == 200
        assert kept.states() == {"a": "listed", "b": "listed", "c": "ready"}
    assert kept.watch.most_planned <= memory


@pytest.mark.long
def test_a_model_has_its_own_settings_each_time_it_is_loaded(paths: dict[str, Path]) -> None:
    with kept_models(paths, contexts={"a": 64, "b": 128}) as kept:
        for _ in range(2):
            for name, context in (("a", 64), ("b", 128)):
                assert kept.ask(name)[0] == 200
                listed = {model["id"]: model for model in kept.get("/v1/models")["data"]}
                assert (listed[name]["max_model_len"], listed[name]["status"]["value"]) == (context, "loaded")
                status, _, answer = kept.ask(name, prompt="x" * context)
                assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert kept.watch.opened == {"a": 2, "b": 2}
