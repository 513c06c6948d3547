"""A step with a draft head, or with inputs of each block, repeats no work and does none in vain."""

from dataclasses import replace

import mlx.core as mx
import pytest
from support.engines.tiny_engine import GOLDEN
from support.models.heads import EAGLE3, EAGLE3_TOKENS, config_of, model_with_head
from support.models.plain_weights import PlainWeights

from mlxinfer import kernels_cpu
from mlxinfer.cache.base import Segment
from mlxinfer.cache.paged import PagedCache
from mlxinfer.cache.step import CacheStep
from mlxinfer.models import build
from mlxinfer.models.heads.eagle3 import Eagle3
from mlxinfer.nn.linear import Embedding
from mlxinfer.nn.packing import settle

TOKENS = mx.array([5, 9, 14], mx.int32)


def first_step(model):
    cache = PagedCache(model.layers, dtype=mx.float32, kv_cache_tokens=256, chunk=64)
    return cache.begin([Segment(cache.open(), 0, 3, 0, 3)])


def test_a_drafter_with_the_models_embeddings_reads_those_that_are_there(monkeypatch):
    head = EAGLE3 | {"hidden_size": 48, "d2t": [token - i for i, token in enumerate(EAGLE3_TOKENS)]}
    model, _ = model_with_head("llama", head)
    assert isinstance(model.mtp, Eagle3)
    model.mtp = replace(model.mtp, embedding=None)
    asked, gather = [], Embedding.__call__
    monkeypatch.setattr(Embedding, "__call__", lambda self, tokens: asked.append(self) or gather(self, tokens))
    step = first_step(model)
    mx.eval(model.hidden(TOKENS, step), step.state)
    assert asked == [model.embedding]
    model.embedding_scale = 2.0  # a drafter was trained on embeddings as they are stored
    embedded = model._embedded(TOKENS)
    assert mx.array_equal(2.0 * model._for_head(TOKENS, embedded), embedded)


@pytest.mark.skipif(not kernels_cpu.in_use(), reason=kernels_cpu.status())
def test_blocks_run_whole_on_the_cpu_next_to_a_drafter_whose_layer_has_no_kernel(monkeypatch):
    """And the drafter reads between them what it reads where they run operation by operation."""
    model, _ = model_with_head("llama", EAGLE3 | {"d2t": [token - i for i, token in enumerate(EAGLE3_TOKENS)]})
    whole, found = [], []
    run, follow = CacheStep.run_blocks, Eagle3.follow
    monkeypatch.setattr(CacheStep, "run_blocks", lambda self, *given: whole.append(self) or run(self, *given))
    monkeypatch.setattr(
        Eagle3, "follow", lambda self, embedded, hidden, *rest: found.append(hidden) or follow(self, embedded, hidden, *rest)
    )
    for runs in (3, 0):  # one from each tap to the next
        step, before = first_step(model), len(whole)
        if not runs:
            monkeypatch.setattr(CacheStep, "runs_blocks", False)
        mx.eval(model.hidden(TOKENS, step), step.state)
        assert len(whole) - before == runs
    assert found[0].shape == (3, 3 * 48)
    assert mx.allclose(*found, atol=1e-5)


class Apart:
    """Inputs of each block that are not joined into one array."""

    def __init__(self, each):
        self.each = each

    def __getitem__(self, block):
        return self.each[block]


def test_inputs_of_blocks_are_joined_for_the_cpu_kernels_only(monkeypatch):
    name = "gemma4_text_shared"
    model = build(config_of(name), PlainWeights.open(GOLDEN / name / "model.safetensors"), ready=settle)
    monkeypatch.setattr(CacheStep, "runs_blocks", False)
    x, step = model._embedded(TOKENS), first_step(model)
    rotations, inputs = model.rotations(step), model.inputs(TOKENS, x)
    y = model.advance(x, step, rotations, inputs=Apart(inputs))
    assert y.shape == x.shape
