"""Steps of a model on several machines are not replayed, because the other machines are notified of each."""

from __future__ import annotations

import pytest
from support.engines.replayed import choices_of_a_gpu, engine, steps

from mlxinfer.engine.runner.compiled_step import CompiledSteps
from mlxinfer.models.decoder import Decoder


@pytest.mark.parametrize("way", ["rest", "spread"])  # by layers, by heads
def test_divided_models_have_no_compiled_steps(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with choices_of_a_gpu():
        made = engine()
        model, cache = made.model, made.cache
        assert isinstance(model, Decoder)
        assert steps(made) is not None
        monkeypatch.setattr(model, way, lambda x, step, inputs, adapters=(): x)
        assert CompiledSteps.of(model, cache) is None
