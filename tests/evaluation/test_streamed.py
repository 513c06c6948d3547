"""A model that does not fit in memory says the same, read one block at a time."""

from __future__ import annotations

import gc
from contextlib import contextmanager

import mlx.core as mx
import numpy as np
import pytest
from support.checkpoints import GOLDEN
from support.tiny_directory import tiny_directory

from mlxinfer import LLM
from mlxinfer.errors import MemoryPlanError
from mlxinfer.evaluation import measure, streamed
from mlxinfer.evaluation.measure import Reading, compare
from mlxinfer.evaluation.streamed import can_stream, streamed_logits
from mlxinfer.evaluation.texts import Window, Windows
from mlxinfer.models.block import Block

WINDOWS = Windows((Window(tuple(range(3, 90)), 0), Window((5, 3, 8), 1), Window(tuple(range(70, 3, -1)), 2)), "some")


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_moe", "qwen3_next", "granite", "gemma2", "gpt_oss"])
def test_it_is_what_the_engine_computes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed, "_ROWS", 50)
    rows = np.concatenate([np.array(each) for each in streamed_logits(GOLDEN / name, WINDOWS, mx.float32)])
    with LLM(GOLDEN / name, dtype="float32") as llm:
        expected = np.concatenate([np.array(llm.logits(list(window.ids))) for window in WINDOWS.windows])
    assert rows.shape == expected.shape
    assert np.abs(rows - expected).max() < 2e-3 * np.abs(expected).max()


@pytest.mark.long
def test_one_block_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    read = streamed._Reader.read
    others = {id(node) for node in gc.get_objects() if isinstance(node, Block)}  # models that other tests keep

    def watched(self, part):
        if isinstance(part, Block):
            gc.collect()
            heavy = [node for node in gc.get_objects() if isinstance(node, Block) and id(node) not in others and streamed_size(node) > 10]
            assert heavy == [part]
        read(self, part)

    def streamed_size(block):
        return max(linear.matrix.shape[0] for linear in streamed.objects(block) if isinstance(linear, streamed.Linear))

    monkeypatch.setattr(streamed._Reader, "read", watched)
    done = []
    assert len(list(streamed_logits(GOLDEN / "llama", WINDOWS, mx.float32, done.append))) == 3
    assert done == [1, 2, 3]


def test_models_that_do_not_fit_are_compared_all_the_same(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_directory(tmp_path / "model", eos=False)
    reading = Reading(positions=120, length=40)
    fits = compare(model, [model], reading)

    @contextmanager
    def full(*_):
        raise MemoryPlanError("too large")
        yield

    monkeypatch.setattr(measure, "open_model", full)
    found = compare(model, [model], reading)
    assert found.teacher.ppl == pytest.approx(fits.teacher.ppl, rel=1e-4)
    assert found.students[0].kl_mean < 1e-6
    with pytest.raises(MemoryPlanError):
        compare(model, [model], Reading(positions=120, length=40, students={"kv": "4"}))


def test_what_has_no_graph_cannot_be_streamed(tmp_path) -> None:
    assert can_stream(GOLDEN / "llama")
    assert not can_stream(tmp_path)
