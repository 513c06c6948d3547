"""Faults and slowness that only a Mac would show, each with the test that shows on Linux that it does not occur."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

SHOWN_BY = {
    "a variant of a kernel that was not tried fails later": "cache/attention/test_trial.py::test_the_trial_runs_all_that_a_model_can_reach",
    "a kernel that fails ends its server": "engine/runner/test_kernel_fallback.py::test_the_answers_come_by_plain_mlx",
    "an engine that fails twice is gone": "engine/runner/test_kernel_fallback.py::test_an_engine_that_fails_once_an_hour_goes_on",
    "a threadgroup needs more registers than a core has": (
        "kernels_metal/paged_attention/test_decode_plan.py::test_every_tile_fits_into_threadgroup_memory"
    ),
    "sockets have paths of 103 bytes at most": "server/access/test_sockets.py",
    "weights are rounded to bfloat16, 256 files may be open, there is no /proc": "support/processes/mac_like.py",
    "the runner hangs in a wait for the GPU": "../.github/workflows/tests.yml",
    "no kernel runs in the CI that has a GPU": "support/kernels/emulated.py",
    "an array that was kept unevaluated belongs to another thread": (
        "kernels_metal/test_cached_arrays.py::test_made_in_one_thread_and_used_in_another"
    ),
    "launchd does not make a socket's directory": "server/test_process.py::test_install_makes_the_directory_that_launchd_does_not",
    "256 files are fewer than connections": "server/test_process.py",
    "K-quants become three times as large": "loading/gguf/test_gguf_on_gpu.py::test_memory_of_llama_8b",
    "Metal compiles in the middle of a conversation": ("cache/attention/test_trial.py::test_its_variants_are_the_same_on_every_chip"),
    "the GPU waits after each chunk of a prompt": "engine/core/test_engine_overlap.py::test_a_long_prompt_is_read_in_three_steps",
    "each chunk joins the whole past": "engine/core/test_engine_overlap.py::test_long_steps_join_less_of_the_past",
    "a quantized past does not reach the matrix units": "cache/attention/test_prefill_choice.py::test_the_rule",
    "two rows cost eight launches": "cache/attention/test_metal_launches.py::test_attention_is_five_launches_in_a_row",
    "a large GPU idles at short contexts": (
        "kernels_metal/paged_attention/test_decode_plan.py::test_short_contexts_give_every_core_something"
    ),
    "the GPU waits at each filled page": "engine/core/test_engine_overlap.py::test_a_filled_page_drains_nothing",
    "a large pool ends command buffers": "util/test_environment_of_mlx.py::test_command_buffers_of_a_mac_may_read_large_pools",
    "a growing pool is there twice": "loading/memory/test_plan_macs.py::test_a_growing_pool_is_there_twice_in_parts",
    "a pool is copied when a page is sealed": "engine/core/test_engine_overlap.py::test_pools_are_written_where_they_lie",
    "recurrent states are gathered and scattered": "cache/test_state.py::test_states_are_not_gathered_while_the_same_go_on",
    "MLX hashes a kernel's comments in each call": ("kernels_metal/test_source.py::test_a_source_is_shorter_and_says_the_same"),
    "a plan forgets what prefill copies": "loading/memory/test_plan_macs.py::test_what_metal_leaves_to_plain_mlx_is_counted_at_16_bits",
    "a small Mac's memory goes to logits": "loading/memory/test_plan_macs.py::test_gemma_3_4b_in_4_bits_has_a_long_chat_on_8_gb",
    "two models are promised the same memory": "loading/memory/test_memory_budget.py",
    "float32 is TF32 on an M5": "cli/health/test_diagnosis.py",
    "Metal's fast cosines are less exact": "nn/test_rope.py",
    "tiny scales are subnormal halves": "kernels_metal/test_seal_page.py::test_a_constant_comes_back_exactly",
}
"""Not shown by any, as only a Mac can: that pools are still written in place when references to the step before are dropped late, and that
models above the part of memory that is wired are not paged out. `docs/first-hour-on-a-mac.md` has steps for the former."""


@cache
def names_in(file: Path) -> frozenset[str]:
    """Names of the tests in a file."""
    return frozenset(node.name for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("where", SHOWN_BY.values(), ids=[*SHOWN_BY])
def test_it_is_there(where: str) -> None:
    file, _, name = where.partition("::")
    assert (TESTS / file).exists()
    assert not name or name in names_in(TESTS / file)
