"""Configs as publishers wrote them are accepted, or refused for a reason that the table names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlxinfer.errors import UnsupportedModelError
from mlxinfer.loading.directory import read_config
from mlxinfer.models import architecture, supports
from mlxinfer.models.config_reader import with_ignored
from mlxinfer.models.fallback import mlx_lm as mlx_lm_fallback
from tests.configs.published import FILE, NO_GRAPH, REFUSED, published

pytestmark = pytest.mark.smoke
OWN = [name for name, config in published().items() if supports(config["model_type"])]


def test_there_are_enough_of_them_and_each_says_where_it_is_from() -> None:
    rows = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
    assert len(rows) >= 120
    assert len({row["id"] for row in rows}) == len(rows)
    assert all(row["origin"] for row in rows)
    assert len({config["model_type"] for config in published().values()}) >= 50


@pytest.mark.parametrize("name", OWN)
def test_a_config_of_a_family_with_a_graph(name: str, tmp_path: Path) -> None:
    config = published()[name]
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if name in REFUSED:
        with pytest.raises(UnsupportedModelError, match=REFUSED[name].partition(":")[0]):
            architecture(read_config(tmp_path))
        return
    found = architecture(read_config(tmp_path))
    text = config.get("text_config") or config.get("llm_config") or config
    assert found.sizes.layers == text.get("num_hidden_layers", found.sizes.layers)
    assert found.sizes.vocab == text.get("vocab_size", found.sizes.vocab)


@pytest.mark.parametrize("name", [name for name in published() if name not in OWN])
def test_a_config_of_another_family_runs_on_the_graph_of_mlx_lm_or_has_none(name: str) -> None:
    config = published()[name]
    if config["model_type"] in NO_GRAPH:
        with pytest.raises(UnsupportedModelError, match=config["model_type"]):
            mlx_lm_fallback.check_supported(config)
    else:
        mlx_lm_fallback.check_supported(config)


def test_every_refusal_in_the_table_is_one() -> None:
    kinds = {config["model_type"] for config in published().values()}
    assert set(NO_GRAPH) <= kinds
    assert set(REFUSED) <= set(OWN)


@pytest.mark.parametrize("name", OWN[::5])
@pytest.mark.parametrize(("key", "value"), [("residual_rescale", 2.0), ("use_double_attention", True), ("clip_qkv", 8.0)])
def test_a_key_that_nobody_knows_is_refused_with_a_way_on(name: str, key: str, value: object) -> None:
    config = published()[name]
    place = next((part for part in ("text_config", "llm_config") if part in config), None)
    changed = config | ({place: config[place] | {key: value}} if place else {key: value})
    with pytest.raises(UnsupportedModelError, match=f"{key}.*--ignore-config-key {key}"):
        architecture(changed)
    architecture(with_ignored(changed, [key]))
