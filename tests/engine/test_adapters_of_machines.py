"""Adapters of a model on several machines stay as they were, however it is divided."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mlxinfer.engine.adapter_set import AdapterSet
from mlxinfer.errors import AdapterError


@pytest.mark.parametrize("divided", [{"rest": print, "spread": None}, {"rest": None, "spread": print}])
def test_none_is_loaded_or_unloaded(divided: dict[str, Any]) -> None:
    adapters = AdapterSet(SimpleNamespace(model=SimpleNamespace(**divided)), None, 10**9, lambda size: 0)  # type: ignore[arg-type]
    with pytest.raises(AdapterError, match="runs on several machines"):
        adapters.load(SimpleNamespace(name="a"))  # type: ignore[arg-type]
    with pytest.raises(AdapterError, match="runs on several machines"):
        adapters.unload("a")
