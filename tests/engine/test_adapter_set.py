"""Adapters of a model on several machines cannot be changed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mlxinfer.engine.adapter_set import AdapterSet
from mlxinfer.errors import AdapterError


def test_none_is_loaded_or_unloaded() -> None:
    adapters = AdapterSet(SimpleNamespace(model=SimpleNamespace(divided=True)), None, 10**9, lambda size: 0)  # type: ignore[arg-type]
    with pytest.raises(AdapterError, match="runs on several machines"):
        adapters.load(SimpleNamespace(name="a"))  # type: ignore[arg-type]
    with pytest.raises(AdapterError, match="runs on several machines"):
        adapters.unload("a")
