"""A model of which other machines have a part cannot be looked into."""

from __future__ import annotations

import pytest
from support.engines.tiny_engine import tiny_model

from mlxinfer.errors import UnsupportedModelError
from mlxinfer.interpret.interventions import steering
from mlxinfer.interpret.places import native


@pytest.mark.parametrize("way", ["rest", "spread"])
def test_it_is_refused_in_a_line(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    assert native(model) is model
    monkeypatch.setattr(model, way, lambda x, step, inputs, adapters=(): x)
    with pytest.raises(UnsupportedModelError, match="llama runs on several machines, which cannot be looked into: load it on one"):
        native(model)
    with pytest.raises(UnsupportedModelError, match="several machines"):
        steering(model, 0, [0.0] * 64, 1.0, None)
