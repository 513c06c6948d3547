"""A share of every block: what it computes, summed over all shares, is what whole blocks compute."""

import json

import mlx.core as mx
import numpy as np
import pytest
from support.engines.shares import parts_of, through
from support.engines.tiny_engine import GOLDEN

from mlxinfer.distributed.plan import plan_shares
from mlxinfer.errors import UnsupportedModelError
from mlxinfer.loading.load import prepare
from mlxinfer.loading.safetensors import SafetensorsFile
from mlxinfer.models.tensor_parallel import FAMILIES, Shard, _columns, shared_config
from mlxinfer.nn.weights import FLOAT8, Format, Quantized

CONFIGS = {path.name: json.loads((path / "config.json").read_text()) for path in sorted(GOLDEN.iterdir())}


def rows_for(stack):
    return np.random.default_rng(1).normal(size=(5, stack.hidden_size)).astype(np.float32)


DIVIDED = [name for name in CONFIGS if CONFIGS[name]["model_type"] in FAMILIES]


def test_every_family_that_is_said_to_be_divided_is_tried():
    assert {CONFIGS[name]["model_type"] for name in DIVIDED} == FAMILIES


@pytest.mark.parametrize("name", DIVIDED)
def test_shares_sum_up_to_whole_blocks(name):
    shares, whole = parts_of(name, 2, dtype="float32")
    exact = through([whole], rows_for(whole))
    np.testing.assert_allclose(through(shares, rows_for(whole)), exact, rtol=2e-4, atol=2e-5 * np.abs(exact).max())


def test_columns_of_quantized_matrices_are_cut_between_groups():
    shares, whole = parts_of("llama", 2, bits=8, group_size=32)
    exact = through([whole], rows_for(whole))
    difference = np.abs(through(shares, rows_for(whole)) - exact).max()
    assert difference < 0.02 * np.abs(exact).max()  # activations are rounded where products are packed


@pytest.mark.parametrize("group", [32, 128])
def test_columns_of_8_bit_floats_keep_the_scales_of_their_groups_or_rows(group):
    codes = np.random.default_rng(3).integers(0, 0x7F, (4, 128), dtype=np.uint8)
    scales = np.random.default_rng(4).uniform(1, 2, (4, 128 // group)).astype(np.float32)
    whole = Quantized(mx.array(codes.view(np.uint32)), mx.array(scales), None, Format(8, group, FLOAT8))
    parts = [_columns("m", whole, first, 64).dequantize(mx.float32) for first in (0, 64)]
    assert mx.array_equal(mx.concatenate(parts, axis=-1), whole.dequantize(mx.float32))


@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - set(DIVIDED)))
def test_other_families_are_refused_by_name_before_a_weight_is_read(name, monkeypatch):
    monkeypatch.setattr(SafetensorsFile, "read", None)
    with prepare(GOLDEN / name) as found, pytest.raises(UnsupportedModelError, match=rf"^{found.model_type} cannot be divided by heads"):
        plan_shares(found, [10**9, 10**9])


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("llama", {}, "num_key_value_heads is 2, which 3 machines cannot share"),
        ("gemma3_text", {"head_dim": None}, "the config does not say head_dim"),
    ],
)
def test_what_cannot_be_divided_is_refused(name, changes, why):
    with pytest.raises(UnsupportedModelError, match=why):
        shared_config(CONFIGS[name] | changes, Shard(0, 3))
