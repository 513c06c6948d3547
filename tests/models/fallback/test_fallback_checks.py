"""Facts about mlx-lm's graphs: stored logits of transformers, refusals, and the table in docs/models.md."""

from __future__ import annotations

import pkgutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.fallback.cases import CASES, RENAMED, WHOLE, WRAPPED
from support.fallback.golden import KINDS, golden
from support.fallback.page import PAGE, table
from support.oracles.plain_step import PlainCache
from support.processes.optional import Later

from mlxinfer.errors import UnsupportedModelError
from mlxinfer.models import supports
from mlxinfer.models.fallback import mlx_lm as zoo
from mlxinfer.models.fallback.checks import CHECKS, check_of, note_of


def logits(model: zoo.FallbackModel, tokens: np.ndarray, chunks: tuple[int, ...]) -> np.ndarray:
    cache, rows, start = PlainCache(model.layers), [], 0
    for count in chunks:
        row = mx.array(tokens[start : start + count].astype(np.int32))
        rows.append(model.logits(model.hidden(row, cache.step([(0, count)]))))
        start += count
    return np.array(mx.concatenate(rows))


@pytest.mark.parametrize("kind", KINDS)
def test_stored_logits(kind: str) -> None:
    config, tensors, tokens, expected = golden(kind)
    model = zoo.build(config, {name: mx.array(tensor) for name, tensor in tensors.items()})
    for chunks in ((60,), (30, 1, 29)):
        assert np.abs(logits(model, tokens, chunks) - expected).max() < 2e-4


def test_every_architecture_that_is_offered_is_known() -> None:
    folder = Path(next(iter(Later("mlx_lm.models").__path__)))
    modules = {module.name for module in pkgutil.iter_modules([str(folder)])}
    graphs = {name for name in modules if "ModelArgs" in (folder / f"{name}.py").read_text(encoding="utf-8")}
    offered = {name for name in graphs | set(Later("mlx_lm.utils").MODEL_REMAPPING) if not supports(name)}
    assert set(CHECKS) <= offered
    assert all(check_of(name).error is not None or check_of(name).reason for name in offered)
    compared = {name for name in CHECKS if check_of(name).error is not None}
    cases = set(CASES) | set(RENAMED) | set(WHOLE) | set(WRAPPED)
    assert compared <= cases, compared - cases


def test_errors_are_small() -> None:
    assert all(check.error is None or 0 < check.error < 1e-2 for check in CHECKS.values())


def test_what_was_not_compared_says_so() -> None:
    assert note_of("stablelm") == ()
    assert "transformers 5.23 does not have it" in note_of("baichuan_m1")[0]
    assert "ai2-olmo" in note_of("olmo")[0]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "glm"}, "rotates all channels"),
        ({"model_type": "mamba2", "n_groups": 8}, "n_groups is 8"),
        ({"model_type": "gpt_bigcode", "multi_query": False}, "multi_query"),
        ({"model_type": "gpt2", "activation_function": "relu"}, "activation_function is relu"),
        ({"model_type": "gpt_neox", "hidden_act": "relu"}, "hidden_act is relu"),
        ({"model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv is 8"),
        ({"model_type": "qwen2_moe", "norm_topk_prob": True}, "norm_topk_prob is True"),
        ({"model_type": "stablelm", "hidden_act": "gelu"}, "hidden_act is gelu"),
        ({"model_type": "solar_open", "rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope scaling is yarn"),
        ({"model_type": "minimax", "architectures": ["MiniMaxForCausalLM"]}, "MiniMax-M2"),
        (
            {
                "model_type": "minimax_m3_vl",
                "text_config": {"rotary_dim": 8, "head_dim": 32, "rope_parameters": {"partial_rotary_factor": 0.5}},
            },
            "rotary_dim is 8",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else value["model_type"],
)
def test_what_differs_is_refused_by_name(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason) as raised:
        zoo.build(config, {})
    assert config["model_type"] in str(raised.value)


def test_a_model_carries_the_note() -> None:
    config, tensors, _, _ = golden("gpt2")
    model = zoo.build(config, {name: mx.array(tensor) for name, tensor in tensors.items()})
    assert not any("not compared" in note for note in model.notes)
    assert any("not compared" in note for note in zoo.FallbackModel(model.model, {"model_type": "nanbeige"}).notes)


def test_the_page_has_the_table() -> None:
    assert table() in PAGE.read_text(encoding="utf-8"), "python -m support.fallback.page, from tests"
