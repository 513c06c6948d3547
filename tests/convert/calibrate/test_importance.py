"""Inputs of each matrix of a model."""

from __future__ import annotations

import json
from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from support.models.families import GOLDEN, NAMES

from mlxinfer.cache.base import Segment
from mlxinfer.cache.paged import PagedCache
from mlxinfer.convert.calibrate import blockwise as stream
from mlxinfer.convert.calibrate.blockwise import places_of, tensors_of
from mlxinfer.convert.calibrate.importance import Moments, measure
from mlxinfer.errors import UnsupportedModelError
from mlxinfer.loading.load import open_checkpoint
from mlxinfer.loading.weights import CheckpointWeights, MetaWeights
from mlxinfer.models import architecture, build
from mlxinfer.models.blockwise import BlockReader
from mlxinfer.nn import linear
from mlxinfer.nn.packing import settle

TEXTS = [list(range(3, 80)), [5, 3, 5], [8]]


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_every_matrix_of_every_family_is_met(name):
    checkpoint = open_checkpoint(GOLDEN / name)
    found = measure(checkpoint, TEXTS)
    meta = MetaWeights(checkpoint)
    model = build(checkpoint.config, meta)
    tied = model.head is None
    for tensor in meta.tensors.values():
        request = tensor.request
        gathered = ("embed_tokens.weight", "embeddings.weight")
        if request.kind != "matrix" or (request.name.endswith(gathered) and not tied) or "embed_tokens_per_layer" in request.name:
            continue
        if not request.quantizable and request.name not in found:
            continue
        importance = found[request.name]
        assert importance.shape[-1] == request.shape[-1], request.name
        assert importance.shape[:-1] == request.shape[:-2], request.name
        assert mx.all(importance >= 0).item()
        assert mx.all(mx.isfinite(importance)).item()


@pytest.mark.parametrize("name", NAMES)
def test_the_figures_are_those_of_the_whole_model(name, monkeypatch):
    """Compares with all blocks in memory and all texts in one step, through the model's own forward pass."""
    monkeypatch.setattr(stream, "default_dtype", lambda: mx.float32)
    checkpoint = open_checkpoint(GOLDEN / name)
    found = measure(checkpoint, TEXTS, batch=8)
    weights = stream.StreamedWeights(checkpoint, mx.float32, progress=None)
    model = build(checkpoint.config, CheckpointWeights(checkpoint, mx.float32))
    model.joined = False
    expected = {}
    for linears in places_of([model.inputs, model.blocks]):
        place = Moments()
        linears[0].matrix = stream._Watched(linears[0].matrix, place)
        expected |= {weights.stored_name(tensor): place for linear in linears for tensor in tensors_of(linear)}
    ids, lengths = [token for text in TEXTS for token in text], [len(text) for text in TEXTS]
    cache = PagedCache(model.layers, dtype=mx.float32, kv_cache_tokens=512, chunk=max(lengths))
    starts = np.cumsum([0, *lengths[:-1]]).tolist()
    step = cache.begin([Segment(cache.open(), start, count, 0, count) for start, count in zip(starts, lengths, strict=True)])
    mx.eval(model.hidden(mx.array(ids, mx.int32), step))
    assert expected.keys() == {tensor for tensor in found if not tensor.endswith(("lm_head.weight", "embed_tokens.weight"))}
    for tensor, place in expected.items():
        np.testing.assert_allclose(np.array(found[tensor]), np.array(place.mean()), rtol=2e-2, atol=1e-6, err_msg=tensor)


def test_a_mean_square_is_that_of_the_numbers_that_mlx_multiplies(monkeypatch):
    monkeypatch.setattr(stream, "default_dtype", lambda: mx.float32)
    checkpoint = open_checkpoint(GOLDEN / "llama")
    found = measure(checkpoint, TEXTS)
    model = build(checkpoint.config, CheckpointWeights(checkpoint, mx.float32))
    inputs = {}
    plain = linear.multiply

    def watched(x, matrix):
        inputs[id(matrix)] = x
        return plain(x, matrix)

    monkeypatch.setattr(linear, "multiply", watched)
    ids = [token for text in TEXTS for token in text]
    cache = PagedCache(model.layers, dtype=mx.float32, kv_cache_tokens=512, chunk=80)
    starts = [0, 77, 80]
    step = cache.begin([Segment(cache.open(), start, len(text), 0, len(text)) for start, text in zip(starts, TEXTS, strict=True)])
    mx.eval(model.hidden(mx.array(ids, mx.int32), step))
    down = model.blocks[1].mlp.down
    expected = np.square(np.array(inputs[id(down.matrix)], np.float64)).mean(0)
    np.testing.assert_allclose(np.array(found["model.layers.1.mlp.down_proj.weight"]), expected, rtol=1e-3)
    joined = np.square(np.array(inputs[id(model.blocks[1].mixer.qkv.linears[0].matrix)], np.float64)).mean(0)
    for part in "qkv":
        np.testing.assert_allclose(np.array(found[f"model.layers.1.self_attn.{part}_proj.weight"]), joined, rtol=1e-3)


def test_experts_that_see_nothing_have_what_all_have():
    checkpoint = open_checkpoint(GOLDEN / "qwen3_moe")
    found = measure(checkpoint, [[3]])
    name = next(name for name in found if name.endswith("switch_mlp.gate_proj.weight"))
    rows = np.array(found[name])
    assert (rows.max(-1) > 0).all()


def test_places_do_not_depend_on_how_matrices_are_stored():
    checkpoint = open_checkpoint(GOLDEN / "qwen3_moe")
    plain = build(checkpoint.config, MetaWeights(checkpoint))
    packed = build(checkpoint.config, CheckpointWeights(checkpoint, mx.float32), ready=partial(settle))
    for one, other in zip(plain.blocks, packed.blocks, strict=True):
        assert [len(place) for place in places_of(one)] == [len(place) for place in places_of(other)]


def test_a_config_need_not_name_what_its_family_has_always():
    config = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "hidden_size": 2560}}
    assert architecture(config).sizes.vocab == 262208


def test_a_matrix_that_nobody_can_name_is_refused(monkeypatch):
    """Otherwise it would be rounded silently as if all inputs were equal."""
    load = linear.Linear.load.__func__

    def unnamed(cls, weights, name, *shape, **settings):
        found = load(cls, weights, name, *shape, **settings)
        found.projections = () if name.endswith("down_proj") else found.projections
        return found

    monkeypatch.setattr(linear.Linear, "load", classmethod(unnamed))
    with pytest.raises(
        UnsupportedModelError, match=r"Block does not show what model\.layers\.0\.mlp\.down_proj\.weight is multiplied with: use the"
    ):
        measure(open_checkpoint(GOLDEN / "llama"), TEXTS)


class Strange:
    """An unknown kind of part."""


def test_a_part_that_is_not_known_is_refused():
    reader = BlockReader(architecture(open_checkpoint(GOLDEN / "llama").config), [], mx.float32)
    with pytest.raises(UnsupportedModelError, match=r"this model has a Strange, which cannot be read block by block: give more memory, or"):
        reader(Strange())


@pytest.mark.parametrize(("start", "with_head"), [("model.language_model.", True), ("", False)])
def test_tensors_with_other_names_are_found(start, with_head, tmp_path):
    """Tensors of a text model inside a larger one, and of a model saved without its head."""
    config = json.loads((GOLDEN / "gemma3_text" / "config.json").read_text())
    config = {"model_type": "gemma3", "text_config": config} if with_head else config
    tensors = mx.load(str(GOLDEN / "gemma3_text" / "model.safetensors"))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {start + name.removeprefix("model."): each for name, each in tensors.items()})
    (tmp_path / "config.json").write_text(json.dumps(config))
    found, plain = measure(open_checkpoint(tmp_path), TEXTS), measure(open_checkpoint(GOLDEN / "gemma3_text"), TEXTS)
    assert found.keys() == {start + name.removeprefix("model.") for name in plain}
    assert all(mx.allclose(found[start + name.removeprefix("model.")], each).item() for name, each in plain.items())
