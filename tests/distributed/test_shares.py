"""A share of every block: what it computes, summed over all shares, is what whole blocks compute."""

import mlx.core as mx
import numpy as np
import pytest
from support.plain_step import PlainCache
from support.tiny_engine import GOLDEN

from mlxinfer.errors import MLXInferError
from mlxinfer.loading.load import prepare
from mlxinfer.models.share import Share, shared_config
from mlxinfer.models.stack import Part


def parts_of(name, count, **options):
    """The blocks of a model in shares, and whole."""
    with prepare(GOLDEN / name, **options) as found:
        blocks = len(found.block_bytes)
        shares = [found.read_blocks(Part(0, blocks, rank, count)) for rank in range(count)]
        return [stack for stack, _ in shares], found.read_blocks(Part(0, blocks))[0]


def through(stacks, x):
    """Rows through the blocks of all shares, their parts summed."""
    steps = [PlainCache(stack.layers).step([(0, x.shape[0])]) for stack in stacks]
    turns = [stack.rotations(step) for stack, step in zip(stacks, steps, strict=True)]
    for blocks in zip(*(stack.blocks for stack in stacks), strict=True):
        norms = blocks[0].norms
        each = [b.mixer(x, s, t.get(b.rope), norm=norms.before_mixer) for b, s, t in zip(blocks, steps, turns, strict=True)]
        x = x + sum(each) * blocks[0].residual
        x = x + sum(block.mlp(x, norm=norms.before_mlp) for block in blocks) * blocks[0].residual
    return np.array(x)


@pytest.mark.parametrize("name", ["llama", "llama3_rope", "mistral", "granite", "smollm3", "qwen2", "qwen3"])
def test_shares_sum_up_to_whole_blocks(name):
    shares, whole = parts_of(name, 2)
    rows = mx.random.normal((5, whole.hidden_size), key=mx.random.key(1))
    np.testing.assert_allclose(through(shares, rows), through([whole], rows), rtol=2e-4, atol=2e-5)


def test_columns_of_quantized_matrices_are_cut_between_groups():
    shares, whole = parts_of("llama", 2, bits=8, group_size=32)
    rows = mx.random.normal((5, whole.hidden_size), key=mx.random.key(1))
    exact = through([whole], rows)
    assert np.abs(through(shares, rows) - exact).max() < 0.02 * np.abs(exact).max()  # activations are rounded where products are packed


@pytest.mark.parametrize(
    ("name", "count", "why"),
    [("qwen3_next", 2, "only by layers"), ("llama", 3, "3 machines cannot share"), ("gemma3_text", 2, "only by layers")],
)
def test_what_cannot_be_divided_is_refused(name, count, why):
    import json

    config = json.loads((GOLDEN / name / "config.json").read_text())
    with pytest.raises(MLXInferError, match=why):
        shared_config(config, Share(0, count))
