"""Passed trials are kept on disk: a second process launches none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.kernels.emulated import needs_emulator
from support.models.wide import wide_directory

PROGRAM = Path(__file__).parents[1] / "support" / "kernels" / "load_as_on_a_mac.py"
HEADS = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 128}
SIZES: dict[str, dict[str, Any]] = {"llama": HEADS, "qwen3_moe": HEADS | {"moe_intermediate_size": 64, "mlp_only_layers": []}}
"""Of layers with kernels for all of their parts, by family."""


def load(model: Path, home: Path) -> dict[str, Any]:
    cache = os.environ.get("MLXINFER_EMULATOR_CACHE") or Path("~/.cache/mlxinfer/emulator").expanduser()
    environment = os.environ | {"MLXINFER_HOME": str(home), "MLXINFER_EMULATOR_CACHE": str(cache)}
    command = [sys.executable, str(PROGRAM), str(model)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=500)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


ATTENTION = {"paged_attention_decode", "paged_attention_prefill"}
KERNELS = {
    "llama": {"add_norm", "affine_matmul", "sampling_threshold", *ATTENTION},
    "qwen3_moe": {"add_norm", "affine_experts_in", "affine_experts_out", "router", *ATTENTION},
}
TRIALS = {
    "llama": {"attention", "sums with norms", "products of few rows", "top-k and top-p"},
    "qwen3_moe": {"attention", "sums with norms", "choices of experts", "experts of few rows"},
}


@needs_emulator
@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3_moe", marks=pytest.mark.long)])
def test_a_second_process_launches_no_trial(family: str, tmp_path: Path) -> None:
    model = wide_directory(tmp_path / "model", family, **SIZES[family], num_hidden_layers=1, vocab_size=8192)
    home = tmp_path / "home"
    first = load(model, home)
    assert first["loaded"].keys() >= KERNELS[family]
    second = load(model, home)
    assert second["loaded"] == {}
    assert second["answered"] == first["answered"]
    assert second["answered"]["paged_attention_decode"] > 0
    assert second["tokens"] == first["tokens"]
    kept = json.loads((home / "kernel_trials.json").read_text())
    assert kept["trials"].keys() >= TRIALS[family]
