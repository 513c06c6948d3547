"""A model that does not fit in memory gives the same logits when it is read one block at a time."""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.models.destroyed import destroyed
from support.models.families import GOLDEN, LIMIT, NAMES, reference
from support.models.tiny_directory import tiny_directory

from mlxinfer import LLM
from mlxinfer.errors import MemoryPlanError, UnsupportedModelError
from mlxinfer.evaluation import measure
from mlxinfer.evaluation.measure import Reading, can_stream, compare, perplexity, streamed_logits
from mlxinfer.evaluation.probabilities import kl_divergence, logprobs_of
from mlxinfer.evaluation.texts import Window, Windows
from mlxinfer.models.block import AnyBlock
from mlxinfer.nn.packing import holders

GGUF = Path(__file__).parents[1] / "golden" / "gguf"
EMBEDDINGS = Path(__file__).parents[1] / "golden" / "embeddings"
WINDOWS = Windows((Window(tuple(range(3, 90)), 0), Window((5, 3, 8), 1), Window(tuple(range(70, 3, -1)), 2)), "some")
DESTROYED = 0.02
"""Smallest KL divergence of a destroyed golden checkpoint, in nats."""


def by_blocks(path: Path, windows: Windows = WINDOWS) -> np.ndarray:
    return np.concatenate([np.array(rows) for rows in streamed_logits(path, windows, mx.float32)])


def as_a_whole(path: Path) -> np.ndarray:
    with LLM(path, dtype="float32") as llm:
        return np.concatenate([np.array(llm.logits(list(window.ids))) for window in WINDOWS.windows])


def kl(exact: np.ndarray, other: np.ndarray) -> float:
    return float(mx.mean(kl_divergence(logprobs_of(mx.array(exact)), logprobs_of(mx.array(other)))).item())


def check(path: Path, ids: list[int], expected: np.ndarray) -> None:
    """Compare with the reference's logits on its own tokens, among windows of other lengths."""
    logits = by_blocks(path, Windows((Window((5, 3, 8), 0), Window(tuple(ids), 1), Window(tuple(ids[:70]), 2)), "some"))
    assert np.abs(logits[3 : 3 + len(ids)] - expected).max() < LIMIT * max(np.abs(expected).max(), 1)


@pytest.mark.parametrize("name", NAMES)
def test_every_family_has_the_logits_of_transformers(name: str) -> None:
    check(GOLDEN / name, *reference(name))


@pytest.mark.parametrize("name", sorted(path.stem for path in GGUF.glob("*.gguf")))
def test_every_gguf_has_the_logits_of_transformers(name: str) -> None:
    data = np.load(GGUF / f"{name}.npz")
    check(GGUF / f"{name}.gguf", data["ids"].tolist(), data["logits"])


@pytest.mark.parametrize("name", NAMES)
def test_a_destroyed_model_is_found_out(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The difference is as large as the engine's."""
    monkeypatch.setattr(measure, "_LOGIT_ROWS", 50)
    broken = destroyed(GOLDEN / name, tmp_path / "broken")
    exact, expected = as_a_whole(GOLDEN / name), as_a_whole(broken)
    found = kl(by_blocks(GOLDEN / name), by_blocks(broken))
    assert found > DESTROYED
    assert found == pytest.approx(kl(exact, expected), rel=0.02)


def test_inputs_of_every_layer_are_not_left_out(tmp_path: Path) -> None:
    name = "gemma4_text_shared"

    def inputs(tensor: str) -> bool:
        return "embed_tokens_per_layer" in tensor or "per_layer_model_projection" in tensor

    assert kl(by_blocks(GOLDEN / name), by_blocks(destroyed(GOLDEN / name, tmp_path / "broken", inputs))) > 1e-3


@pytest.mark.parametrize("name", ["nemotron_h", "gemma4_text"])
def test_a_model_that_does_not_fit_is_not_certified_when_it_is_destroyed(name: str, tmp_path: Path, full_memory: None) -> None:
    model = tiny_directory(tmp_path / "model", name, eos=False)
    broken = tiny_directory(tmp_path / "broken", name, eos=False)
    (broken / "model.safetensors").unlink()
    destroyed(model, tmp_path / "weights")
    (tmp_path / "weights" / "model.safetensors").rename(broken / "model.safetensors")
    assert (compare(model, [broken], Reading(positions=120, length=40)).students[0].kl_mean or 0) > DESTROYED


def test_one_block_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    heavy: list[int] = []
    before = measure._Float32Reader.prepare
    loaded: list[object] = []

    def prepare(self: measure._Float32Reader, part: object) -> None:
        loaded.append(part)
        blocks = [part for part in loaded if isinstance(part, AnyBlock)]
        heavy.append(sum(max(holder.matrix.shape[0] for holder in holders(block)) > 1 for block in blocks))
        before(self, part)

    monkeypatch.setattr(measure._Float32Reader, "prepare", prepare)
    done: list[int] = []
    assert len(list(streamed_logits(GOLDEN / "llama", WINDOWS, mx.float32, done.append))) == 3
    assert done == [1, 2, 3]
    assert max(heavy) == 1


@pytest.fixture
def full_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every model too large for memory."""

    @contextmanager
    def full(*_):
        raise MemoryPlanError("too large")
        yield

    monkeypatch.setattr(measure, "open_model", full)


def test_models_that_do_not_fit_are_compared_all_the_same(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    model = tiny_directory(tmp_path / "model", eos=False)
    reading = Reading(positions=120, length=40)
    fits = compare(model, [model], reading)
    request.getfixturevalue("full_memory")
    found = compare(model, [model], reading)
    assert found.teacher.ppl == pytest.approx(fits.teacher.ppl, rel=1e-4)
    assert (found.students[0].kl_mean or 0) < 1e-6
    with pytest.raises(MemoryPlanError):
        compare(model, [model], Reading(positions=120, length=40, students={"kv": "4"}))


def test_what_has_no_graph_cannot_be_streamed(tmp_path: Path) -> None:
    assert can_stream(GOLDEN / "llama")
    assert not can_stream(tmp_path)
    shutil.copytree(GOLDEN / "llama", tmp_path / "other")
    (tmp_path / "other" / "config.json").write_text('{"model_type": "other"}')
    assert not can_stream(tmp_path / "other")
    with pytest.raises(UnsupportedModelError, match="architecture 'other' is not supported"):
        by_blocks(tmp_path / "other")


def test_a_model_that_reads_from_both_ends_predicts_nothing(full_memory: None) -> None:
    with pytest.raises(UnsupportedModelError, match="reads texts from both ends"):
        perplexity(EMBEDDINGS / "mean", Reading(positions=40, length=20))


def test_large_texts_pass_in_several_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = by_blocks(GOLDEN / "gemma4_text_shared")
    monkeypatch.setattr(measure, "batches", partial(measure.batches, size=90))
    assert np.abs(by_blocks(GOLDEN / "gemma4_text_shared") - whole).max() < 1e-4
