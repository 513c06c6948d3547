"""Costs of GPTQ in a plan."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.models.checkpoints import config_of, random_checkpoint

from mlxinfer.convert.encode.gptq import encode_with_feedback
from mlxinfer.convert.plan import budget
from mlxinfer.convert.plan.budget import items_of
from mlxinfer.convert.plan.head_cost import rounded
from mlxinfer.convert.plan.sensitivity import Sensitivities, sensitivities
from mlxinfer.convert.plan.weight_map import plan
from mlxinfer.loading.load import open_checkpoint
from mlxinfer.nn.weights import Format, numbers

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 32}
TEXTS = np.random.default_rng(0).integers(3, 96, (12, 40)).tolist()


def found_of(source: Path) -> Sensitivities:
    checkpoint = open_checkpoint(source)
    return sensitivities(checkpoint, checkpoint, TEXTS)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = {**SIZES, "tie_word_embeddings": True}
    return random_checkpoint(tmp_path_factory.mktemp("plans") / "source", config_of("llama", **changes))


def test_the_head_is_judged_with_the_codes_that_gptq_finds(source: Path) -> None:
    """Compares with the divergence of the softmax, computed directly, at the states that H leaves out."""
    final = found_of(source).final
    final.gradients()
    factor, form = final.factor(), Format(3, 32)
    step = final._step()
    others = np.delete(final._rows, np.s_[::step], axis=0)
    assert np.allclose(np.array(factor.importance), np.square(others).mean(0), rtol=0.05, atol=0.01 * float(np.square(others).mean()))
    checkpoint = open_checkpoint(source)
    plain = numbers(checkpoint.read(final.name)).astype(mx.float32)
    coded = rounded(plain, form, final.importance, factor)
    codes = np.array(encode_with_feedback(plain, form, factor)[0])
    assert len(np.unique(codes)) == 8

    def logs(matrix: np.ndarray) -> np.ndarray:
        logits = (final._rows[::step] @ matrix.T).astype(np.float64)
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    before, after = logs(np.array(plain)), logs(coded)
    expected = float((np.exp(before) * (before - after)).sum(-1).mean())
    assert final.costs([form], mx.float32, factor)[0] == pytest.approx(expected, rel=1e-3)
    assert final.costs([form], mx.float32)[0] != pytest.approx(expected, rel=1e-3)


def test_layers_are_cheaper_by_what_gptq_was_measured_to_gain(source: Path) -> None:
    checkpoint = open_checkpoint(source)
    planned = plan(checkpoint, Format(4, 64), True, None)
    by_fit, by_gptq = (items_of(checkpoint, planned, found_of(source), feedback=feedback) for feedback in (False, True))
    for ours, fitted in zip(by_gptq[:-1], by_fit[:-1], strict=True):
        assert [choice.cost for choice in ours.choices] == pytest.approx([budget._FED_BACK * choice.cost for choice in fitted.choices])
    heads = [{choice.form: choice.cost for choice in items[-1].choices} for items in (by_gptq, by_fit)]
    shares = [heads[0][form] / heads[1][form] for form in heads[0].keys() & heads[1].keys()]
    assert 0.2 < min(shares) <= max(shares) < 2
