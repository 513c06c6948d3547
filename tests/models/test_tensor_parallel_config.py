"""Configs of which machines are to have shares."""

import pytest

from mlxinfer.errors import UnsupportedModelError
from mlxinfer.models.tensor_parallel import Shard, shared_config

LLAMA = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}


def test_sizes_are_divided():
    shared = shared_config(LLAMA, Shard(0, 2))
    assert (shared["num_attention_heads"], shared["num_key_value_heads"], shared["intermediate_size"], shared["head_dim"]) == (2, 2, 32, 8)


@pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads", "intermediate_size"])
@pytest.mark.parametrize("value", [None, 0, "x"])
def test_sizes_left_to_defaults_are_named(key, value):
    with pytest.raises(UnsupportedModelError, match=f"does not say {key}"):
        shared_config(LLAMA | {key: value}, Shard(0, 2))


def test_what_is_null_stays_null():
    """A null window means no window, also for Mistral, where a missing key means 4096."""
    shared = shared_config(LLAMA | {"sliding_window": None, "num_key_value_heads": None}, Shard(0, 2))
    assert ("sliding_window" in shared, shared["sliding_window"], shared["num_key_value_heads"]) == (True, None, 2)
