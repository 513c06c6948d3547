"""Memory of models with experts in a file: freed while steps run, without waiting for a stream with the GIL, and when a model is closed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.engines.sparse_tiny import sparse_tiny

from mlxinfer import kernels_cpu

SCRIPT = """
import sys, threading
from mlxinfer import LLM, SamplingParams
from mlxinfer.util.device import clear_cache, lift_limits, limit_memory
over = False
def free():
    while not over:
        clear_cache()
        limit_memory(wired=0, spare=1 << 20, most=1 << 34)
with LLM(sys.argv[1], experts_memory=1e-6, max_context=256) as llm:
    thread = threading.Thread(target=free)
    thread.start()
    try:
        found = llm.generate([[5, 6, 7, 8]] * 3, SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True))
    finally:
        over = True
        thread.join()
    assert llm.stats().expert_misses > 0
lift_limits()
print([len(each.token_ids) for each in found])
"""


@pytest.mark.skipif(not kernels_cpu.can_run_waves(), reason=kernels_cpu.status())
def test_memory_is_freed_while_a_step_reads_experts(tmp_path: Path) -> None:
    model = sparse_tiny(tmp_path / "model", "qwen3_moe", "mlx 4 bits")
    environment = {**os.environ, "MLXINFER_HOME": str(tmp_path / "home")}
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(model)], capture_output=True, text=True, env=environment, timeout=240)
    assert done.stdout == "[24, 24, 24]\n", done.stderr


CLOSED = """
import gc, sys
import mlx.core as mx
from mlxinfer import LLM, SamplingParams
before = mx.get_active_memory()
llm = LLM(sys.argv[1], experts_memory=1e-6, max_context=256)
llm.generate([[5, 6, 7, 8]], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
used, misses = mx.get_active_memory(), llm.stats().expert_misses
llm.close()
gc.collect()  # layers and pools refer to each other
print(mx.get_active_memory() - before < (used - before) / 4, misses > 0)
"""


def test_a_closed_model_frees_its_pools(tmp_path: Path) -> None:
    model = sparse_tiny(tmp_path / "model", "qwen3_moe", "mlx 4 bits")
    environment = {**os.environ, "MLXINFER_HOME": str(tmp_path / "home")}
    done = subprocess.run([sys.executable, "-c", CLOSED, str(model)], capture_output=True, text=True, env=environment, timeout=240)
    assert done.stdout == "True True\n", done.stderr
