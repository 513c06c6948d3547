"""Windows that mlx-lm's graphs do not know: within them their logits are right, and no context is longer."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from support.processes.optional import Later

from mlxinfer.models.fallback import mlx_lm as zoo

starcoder2 = Later("mlx_lm.models.starcoder2")

STARCODER2: dict[str, Any] = {
    "model_type": "starcoder2",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "norm_epsilon": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


def tensors() -> dict[str, mx.array]:
    made = starcoder2.Model(starcoder2.ModelArgs.from_dict(STARCODER2))
    return dict(tree_flatten(made.parameters()))


@pytest.mark.parametrize(
    ("settings", "context"),
    [
        ({"sliding_window": 64}, 64),
        ({"sliding_window": None}, 512),
        ({"sliding_window": 1024}, 512),
        ({"sliding_window": 64, "use_sliding_window": False}, 512),
    ],
    ids=str,
)
def test_a_window_that_is_not_known_bounds_the_context(settings: dict[str, Any], context: int) -> None:
    model = zoo.build(STARCODER2 | settings, tensors())
    assert model.max_context == context
    assert any("window of 64" in note for note in model.notes) == (context == 64)
