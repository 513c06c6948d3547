"""Cost of one matrix in a joined product."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.models.checkpoints import config_of, random_checkpoint

from mlxinfer.convert.plan.budget import rounding_costs
from mlxinfer.convert.plan.sensitivity import sensitivities
from mlxinfer.convert.plan.weight_map import plan
from mlxinfer.loading.load import open_checkpoint
from mlxinfer.nn.weights import Format

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 32}
TEXTS = np.random.default_rng(0).integers(3, 96, (4, 16)).tolist()
FORM = Format(4, 32)


def test_a_matrix_is_charged_for_its_own_rows(tmp_path: Path) -> None:
    """Rows of other matrices in the same product do not count, also if these are not planned."""
    source = random_checkpoint(tmp_path / "source", config_of("llama", **{**SIZES, "num_key_value_heads": 1}))
    checkpoint = open_checkpoint(source)
    outputs = {output.request.name: output for output in plan(checkpoint, FORM, True, None).outputs}
    places = next(sensitivities(checkpoint, checkpoint, TEXTS).places())
    found = next(each for place in places for each in place if len(each.names) == 3)
    queries, *others = (outputs[name] for name in found.names)
    rows = found.rows.copy()
    rows[: queries.request.shape[-2]] = 0
    assert rounding_costs(checkpoint, found, others, [FORM]) == pytest.approx(
        rounding_costs(checkpoint, replace(found, rows=rows), others, [FORM])
    )
    both = rounding_costs(checkpoint, found, [queries], [FORM]) + rounding_costs(checkpoint, found, others, [FORM])
    assert both == pytest.approx(rounding_costs(checkpoint, found, [queries, *others], [FORM]))
