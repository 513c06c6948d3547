"""What each matrix of a model is multiplied with."""

from __future__ import annotations

from contextlib import closing
from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from support.checkpoints import GOLDEN, config_of, random_checkpoint

from mlxinfer.cache.base import Segment
from mlxinfer.cache.paged import PagedCache
from mlxinfer.convert import stream
from mlxinfer.convert.importance import measure, random_texts
from mlxinfer.convert.places import names_of_inputs, places_of
from mlxinfer.loading.load import open_checkpoint
from mlxinfer.loading.weights import CheckpointWeights, MetaWeights
from mlxinfer.models import build
from mlxinfer.nn import linear as products
from mlxinfer.nn.packing import settle

TEXTS = [[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5], [8]]


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.iterdir() if (path / "config.json").exists()))
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


def test_one_block_of_layers_is_numbered_at_a_time(tmp_path):
    """Of a large model, the numbered rows of all blocks would take more than anything else."""
    peaks = []
    for layers in (2, 8):
        config = config_of("llama", hidden_size=256, intermediate_size=512, num_hidden_layers=layers)
        with closing(open_checkpoint(random_checkpoint(tmp_path / str(layers), config))) as checkpoint:
            before = mx.get_active_memory()
            mx.reset_peak_memory()
            assert len(names_of_inputs(checkpoint)) == layers + 2
            peaks.append(mx.get_peak_memory() - before)
    assert peaks[1] < 1.5 * peaks[0]


def test_the_figures_are_mean_squares(monkeypatch):
    """Against the inputs of MLX's own products, with the whole model in memory."""
    monkeypatch.setattr(stream, "default_dtype", lambda: mx.float32)
    checkpoint = open_checkpoint(GOLDEN / "llama")
    found = measure(checkpoint, TEXTS)
    model = build(checkpoint.config, CheckpointWeights(checkpoint, mx.float32))
    inputs = {}
    plain = products.multiply

    def watched(x, matrix):
        inputs[id(matrix)] = x
        return plain(x, matrix)

    monkeypatch.setattr(products, "multiply", watched)
    ids = [token for text in TEXTS for token in text]
    cache = PagedCache(model.layers, dtype=mx.float32, kv_cache_tokens=256, chunk=8)
    starts = [0, 8, 11]
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


def test_random_texts_are_always_the_same():
    config = open_checkpoint(GOLDEN / "llama").config
    first, second = random_texts(config), random_texts(config)
    assert first == second
    assert max(map(max, first)) < config["vocab_size"]


def test_places_do_not_depend_on_how_matrices_are_stored():
    checkpoint = open_checkpoint(GOLDEN / "qwen3_moe")
    plain = build(checkpoint.config, MetaWeights(checkpoint))
    packed = build(checkpoint.config, CheckpointWeights(checkpoint, mx.float32), ready=partial(settle))
    for one, other in zip(plain.blocks, packed.blocks, strict=True):
        assert [len(place) for place in places_of(one)] == [len(place) for place in places_of(other)]


def test_a_config_need_not_name_what_its_family_has_always():
    config = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "hidden_size": 2560}}
    assert max(map(max, random_texts(config))) < 262208
