"""The catalogue agrees with itself, and with the published configs of the same models."""

from __future__ import annotations

import re

import mlx.core as mx
import pytest

from mlxinfer.loading.find.hub import HubId
from mlxinfer.loading.find.known import KnownModel, find_known, known_models, search_known
from mlxinfer.loading.find.recommend import OutlinedModel, outline
from mlxinfer.loading.find.resolve import ALIASES
from mlxinfer.nn.weights import Format
from tests.configs.published import published

WITH_CONFIG = [model for model in known_models() if model.config]
FORMS = {"MLX 4 bits": Format(4, 64), "MLX mxfp4": Format(4, 64)}


def test_there_are_enough_of_them_and_their_names_are_unique() -> None:
    models = known_models()
    names = [name.lower().replace(":", "-") for model in models for name in model.names]
    assert len(models) >= 30
    assert len(set(names)) == len(names)
    assert not set(names) & set(ALIASES)
    assert len({model.hub_id for model in models}) == len(models)


@pytest.mark.parametrize("model", known_models(), ids=lambda model: model.name)
def test_every_row_is_whole(model: KnownModel) -> None:
    assert HubId.parse(model.hub_id) == HubId(model.repo, model.file or None)
    assert re.fullmatch(r"[a-z0-9.-]+(:[a-z0-9._-]+)?", model.name)
    assert re.fullmatch(r"([0-9a-f]{40})?", model.revision)
    assert 0 < model.active <= model.parameters
    assert model.source
    assert model.licence
    assert model.good_at
    assert bool(model.file) == model.form.startswith("GGUF ")
    # 4 to 9 bits a parameter, vision towers and scales included
    assert 0.5 <= model.nbytes / 1e9 / model.parameters <= 1.1


@pytest.mark.parametrize("model", WITH_CONFIG, ids=lambda model: model.name)
def test_the_config_in_the_catalogue_makes_the_graph_of_the_published_one(model: KnownModel) -> None:
    assert model.config is not None
    real = {key: value for key, value in published()[model.config_of].items() if key != "quantization_config"}
    ours, theirs = outlined(model, model.config), outlined(model, real)
    assert repr(ours.model.layers) == repr(theirs.model.layers)
    assert ours.weight_bytes == theirs.weight_bytes
    assert ours.model.max_context == theirs.model.max_context == model.context


@pytest.mark.parametrize("model", WITH_CONFIG, ids=lambda model: model.name)
def test_the_published_size_is_that_of_the_graph_and_a_tower(model: KnownModel) -> None:
    """Checkpoints with images or audio have towers, and matrices at more than 4 bits, which the graph of texts does not count."""
    assert model.config is not None
    rest = 1 - outlined(model, model.config).weight_bytes / model.nbytes
    assert -0.06 < rest < (0.3 if "images" in model.good_at else 0.08)


def outlined(model: KnownModel, config: dict[str, object]) -> OutlinedModel:
    return outline(config, mx.bfloat16, FORMS[model.form])


def test_names_in_other_spellings() -> None:
    qwen = find_known("qwen3")
    assert qwen is not None
    assert qwen.name == "qwen3:8b"
    assert find_known("Qwen3-8B") is find_known("qwen3:8b") is qwen
    for name in ("qwen3", "gemma4:26b", "lfm2.5"):
        assert find_known(name), name
    for text in ("", "qwen", "org/name", "./qwen3"):
        assert find_known(text) is None


def test_search_takes_all_words() -> None:
    assert {model.family for model in search_known("gemma4")} == {"gemma4"}
    assert [model.name for model in search_known("qwen3-coder 30b")] == ["qwen3-coder:30b"]
    assert all("images" in model.good_at and model.licence == "MIT" for model in search_known("images mit"))
    assert len(search_known("")) == len(known_models())
    assert search_known("no such model") == []
