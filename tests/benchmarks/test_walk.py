"""Limits on the files and calls that loading a model, a whole request and a decode step pass through."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest
from support.models.tiny_directory import tiny_directory

from benchmarks.walk import load_and_request_walks, report, step_walks
from mlxinfer import kernels_cpu

MOST_FILES_OF_A_LOAD = 88
"""Loading a safetensors checkpoint. Today's count; the aim is below 70. Lower it after each simplification."""
MOST_FILES_OF_A_REQUEST = 42
MOST_FILES_OF_A_STEP = 19
MOST_CALLS_OF_A_STEP = 160

pytestmark = pytest.mark.skipif(not kernels_cpu.in_use(), reason=kernels_cpu.status())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_directory(tmp_path_factory.mktemp("models") / "tiny", eos=False, context=1024))


def test_a_decode_step_stays_small(model: str) -> None:
    walks = step_walks(model, steps=20, temperature=1.0)  # greedy answers are drafted
    assert median(len(walk.files) for walk in walks) <= MOST_FILES_OF_A_STEP, report(walks)
    assert median(walk.calls.total() for walk in walks) <= MOST_CALLS_OF_A_STEP, report(walks, detail=True)


def test_a_load_and_a_request_pass_through_few_files(model: str) -> None:
    load, request = load_and_request_walks(model)
    assert len(load.files) <= MOST_FILES_OF_A_LOAD, report([load])
    assert len(request.files) <= MOST_FILES_OF_A_REQUEST, report([request])


def test_text_costs_a_model_that_sees_nothing() -> None:
    """Steps of text pass through the same files, with the same calls, with a vision tower and without."""
    path = str(Path(__file__).parents[1] / "golden" / "vision" / "smolvlm")
    seeing, blind = (step_walks(path, steps=20, temperature=1.0, vision=mode) for mode in ("on", "off"))
    assert median(walk.calls.total() for walk in seeing) == median(walk.calls.total() for walk in blind), report(seeing, detail=True)
    assert not [name for walk in seeing for name in walk.files if "image" in name or "vision" in name]
