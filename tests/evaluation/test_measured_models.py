"""Models compared with a teacher whose probabilities are in memory or on disk."""

from __future__ import annotations

import math
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.models.tiny_directory import CHARACTERS, tiny_directory

from mlxinfer import LLM
from mlxinfer.errors import EvaluationError, TextError, TokenizerError
from mlxinfer.evaluation import measure
from mlxinfer.evaluation import reference_logprobs as teacher
from mlxinfer.evaluation.measure import Reading, compare, perplexity
from mlxinfer.evaluation.probabilities import kl_divergence, logprobs_of
from mlxinfer.evaluation.reference_logprobs import Teacher

QUICK = Reading(positions=160, length=40)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model, and two that differ from it more and more."""
    folder = tmp_path_factory.mktemp("models")
    for name, noise in (("exact", 0.0), ("near", 0.01), ("far", 0.05)):
        path = tiny_directory(folder / name, eos=False) / "model.safetensors"
        mx.random.seed(1)
        weights = mx.load(str(path)).items()
        mx.save_safetensors(str(path), {key: w + noise * mx.random.normal(w.shape) for key, w in weights})
    return folder


def test_figures_are_those_of_the_definitions(models: Path) -> None:
    found = compare(models / "exact", [models / "near"], QUICK)
    kl, same, ratio = [], [], []
    with LLM(models / "exact", dtype="float32") as p, LLM(models / "near", dtype="float32") as q:
        for window in found.text.windows:
            lp, lq = (np.array(llm.logits(list(window.ids)), np.float64) for llm in (p, q))
            lp, lq = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (lp, lq))
            kl.append((np.exp(lp) * (lp - lq)).sum(-1))
            same.append(lp.argmax(-1) == lq.argmax(-1))
            following = np.array(window.ids[1:])
            ratio.append((lp - lq)[np.arange(len(following)), following])
    student = found.students[0]
    assert student.kl_mean == pytest.approx(np.concatenate(kl).mean(), rel=1e-3)
    assert student.kl_stderr == pytest.approx(np.std([each.mean() for each in kl], ddof=1) / 2, rel=1e-2)
    assert student.kl_p99 == pytest.approx(np.percentile(np.concatenate(kl), 99), rel=1e-3)
    assert student.top1 == np.concatenate(same).mean()
    assert student.ppl_ratio == pytest.approx(math.exp(np.concatenate(ratio).mean()), rel=1e-4)
    assert student.ppl == pytest.approx(found.teacher.ppl * student.ppl_ratio)
    assert (student.positions, student.windows) == (160, 4)


def test_a_model_against_itself_loses_nothing(models: Path) -> None:
    student = compare(models / "exact", [models / "exact"], QUICK).students[0]
    assert student.kl_mean < 1e-7
    assert (student.top1, student.ppl_ratio) == (1.0, 1.0)


def test_differences_are_between_neighbours(models: Path) -> None:
    found = compare(models / "exact", [models / "near", models / "far"], QUICK)
    assert [(each.model, each.against) for each in found.differences] == [("far", "near")]
    near, far = found.students
    assert far.kl_mean > 2 * near.kl_mean
    assert found.differences[0].kl_mean == pytest.approx(far.kl_mean - near.kl_mean)


def test_the_teacher_is_gone_before_a_student_comes(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []

    class Watched(LLM):
        def __init__(self, *args, **options):
            assert not loaded, "two models are in memory"
            loaded.append(self)
            super().__init__(*args, **options)

        def close(self):
            super().close()
            loaded.clear()

    monkeypatch.setattr(measure, "LLM", Watched)
    assert len(compare(models / "exact", [models / "near", models / "far"], QUICK).students) == 2


def test_a_large_teacher_waits_on_disk(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXINFER_HOME", str(tmp_path))
    in_memory = compare(models / "exact", [models / "near"], QUICK)
    monkeypatch.setattr(measure, "_IN_MEMORY", 0.0)
    folders = []
    made = teacher._make_folder
    monkeypatch.setattr(teacher, "_make_folder", lambda folder, nbytes: folders.append(folder) or made(folder, nbytes))
    assert compare(models / "exact", [models / "near"], QUICK).students == in_memory.students
    assert len(folders) == 1
    assert not list(tmp_path.glob("teacher-*"))


def test_what_a_teacher_said_is_used_again(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Reading(positions=160, length=40, cache=tmp_path / "kept")
    first = compare(models / "exact", [models / "near"], kept)
    opened = []
    plain = measure.open_model
    monkeypatch.setattr(measure, "open_model", lambda source, *rest: opened.append(source.name) or plain(source, *rest))
    assert compare(models / "exact", [models / "near"], kept).students == first.students
    assert opened == ["near"]
    compare(models / "exact", [models / "near"], Reading(positions=120, length=40, cache=tmp_path / "kept"))
    assert opened == ["near", "exact", "near"]
    next((tmp_path / "kept").rglob("scores.npz")).unlink()
    assert compare(models / "exact", [models / "near"], kept).students == first.students


def test_no_room_for_a_teacher(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher, "_SLACK", 1 << 60)
    with pytest.raises(EvaluationError, match="are free"):
        compare(models / "exact", [models / "near"], Reading(positions=160, length=40, cache=tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(EvaluationError, match="cannot write"):
        compare(models / "exact", [models / "near"], Reading(positions=160, length=40, cache=tmp_path / "file"))


def test_what_is_kept_is_near_enough() -> None:
    rng = np.random.default_rng(0)
    logits = np.where(rng.random((50, 3000)) < 0.1, -np.inf, rng.normal(0, 6, (50, 3000)))
    logprobs = mx.array((logits - np.log(np.exp(logits).sum(-1, keepdims=True))).astype(np.float32))
    kept = Teacher(50, 3000, None, {})
    kept.write(0, 0, logprobs, np.zeros(50))
    read = kept.read(0, 50)
    possible = np.array(mx.isfinite(logprobs))
    assert np.array_equal(np.array(mx.isfinite(read)), possible)
    assert np.abs(np.array(read)[possible] - np.array(logprobs)[possible]).max() < 1e-3
    assert np.array(mx.exp(read).sum(-1)) == pytest.approx(1.0, abs=1e-5)
    kl = mx.where(mx.array(possible), mx.exp(read) * (read - logprobs), 0).sum(-1)
    assert abs(np.array(kl)).max() < 2e-6
    assert np.array_equal(kept.top, np.array(mx.argmax(logprobs, axis=-1)))


def test_probabilities_are_those_of_doubles() -> None:
    """Also on a CPU, where MLX's own sum of 262,144 exponentials is off by 7e-5."""
    rng = np.random.default_rng(0)
    expected, other = rng.normal(0, 6, (2, 3, 50_000))
    expected[:, :9], other[:, :5] = -np.inf, -np.inf
    exact = [rows - np.log(np.exp(rows).sum(-1, keepdims=True)) for rows in (expected, other)]
    found = [logprobs_of(mx.array(rows.astype(np.float32))) for rows in (expected, other)]
    errors = [np.abs(np.array(rows)[:, 9:] - right[:, 9:]).max() for rows, right in zip(found, exact, strict=True)]
    assert max(errors) < 1e-5  # float32 is no finer at 60
    kl = np.where(np.isfinite(exact[0]), np.exp(exact[0]) * (exact[0] - exact[1]), 0).sum(-1)
    assert np.array(kl_divergence(*found)) == pytest.approx(kl, rel=1e-5)
    assert np.isinf(np.array(kl_divergence(found[1], found[0]))).all()


def test_other_vocabularies_and_no_tokenizer(models: Path, tmp_path: Path) -> None:
    other = tiny_directory(tmp_path / "other", eos=False, characters=[*CHARACTERS[:3], *reversed(CHARACTERS[3:])])
    with pytest.raises(EvaluationError, match="other tokens"):
        compare(models / "exact", [other], QUICK)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (other / name).unlink()
    with pytest.raises(TokenizerError, match="no tokenizer"):
        compare(models / "exact", [other], QUICK)


def test_perplexity_and_short_texts(models: Path, tmp_path: Path) -> None:
    whole, _, notes = perplexity(models / "exact", QUICK)
    assert not notes
    assert whole.ppl == pytest.approx(compare(models / "exact", [models / "near"], QUICK).teacher.ppl)
    (tmp_path / "short.txt").write_text("only a few words")
    _, text, notes = perplexity(models / "exact", Reading(text=tmp_path / "short.txt", positions=160, length=40))
    assert text.positions == 16
    assert "16 positions" in notes[0]
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(TextError, match="no text"):
        perplexity(models / "exact", Reading(text=tmp_path / "empty.txt"))
