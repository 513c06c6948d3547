"""Blocks with sizes that the CPU kernels refuse run operation by operation."""

import json

import pytest
from support.engines.tiny_engine import GOLDEN
from support.models.plain_weights import PlainWeights

from mlxinfer import kernels_cpu
from mlxinfer.models import build
from mlxinfer.nn.packing import settle

pytestmark = pytest.mark.skipif(not kernels_cpu.in_use(), reason=kernels_cpu.status())


def test_groups_with_too_few_experts_do_not_stop_a_model_from_loading():
    """Two experts for each token, from groups of one of which only one is kept."""
    folder = GOLDEN / "glm4_moe"
    config = json.loads((folder / "config.json").read_text())
    config |= {"n_group": config["n_routed_experts"], "topk_group": 1, "num_experts_per_tok": 2}
    model = build(config, PlainWeights.open(folder / "model.safetensors"), ready=settle)
    assert any(run.native is None for run in model.runs)
