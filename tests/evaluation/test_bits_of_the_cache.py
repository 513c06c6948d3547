"""Fewer bits of cached keys and values, of all layers and of single ones."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.models.tiny_directory import tiny_directory

from mlxinfer import LLM
from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.errors import EvaluationError
from mlxinfer.evaluation import kv
from mlxinfer.evaluation.kv import KVLoss, choose, evaluate_kv
from mlxinfer.evaluation.measure import Reading
from mlxinfer.loading.memory.kv_choice import kv_format, save_choice

READING = Reading(positions=200, length=100)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_directory(tmp_path_factory.mktemp("models") / "tiny", eos=False)


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXINFER_HOME", str(tmp_path / "home"))


def test_each_format_is_what_the_engine_computes(model: Path) -> None:
    found, text = evaluate_kv(model, READING, 0.005, layers=False)
    assert [each.kv for each in found.formats] == list(kv.FORMATS)
    expected = []
    with LLM(model, dtype="float32") as exact, LLM(model, dtype="float32", kv="4") as few:
        for window in text.windows:
            p, q = (np.array(llm.logits(list(window.ids)), np.float64)[64:] for llm in (exact, few))
            p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (p, q))
            expected.append((np.exp(p) * (p - q)).sum(-1))
    four = next(each for each in found.formats if each.kv == "4")
    assert four.kl_mean == pytest.approx(np.concatenate(expected).mean(), rel=1e-3)
    assert found.positions == sum(map(len, expected))


@pytest.mark.parametrize("layers", [False, True])
def test_progress_counts_every_window_that_is_read(model: Path, monkeypatch: pytest.MonkeyPatch, layers: bool) -> None:
    monkeypatch.setattr(kv, "FORMATS", ("8", "3"))
    monkeypatch.setattr(kv, "LAYER_BITS", (3,))
    reads, told = [], []
    read = kv._logprobs_with
    monkeypatch.setattr(kv, "_logprobs_with", lambda *given: reads.append(given) or read(*given))
    evaluate_kv(model, READING, 0.005, layers=layers, tell=lambda _, done, total: told.append((done, total)))
    assert told == [(number, len(reads)) for number in range(1, len(reads) + 1)]
    assert len(reads) == 2 * (2 + 1) + layers * 2 * (3 * 2 + 1)


def test_each_layer_alone_adds_up_to_all(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv, "FORMATS", ("8", "3"))
    monkeypatch.setattr(kv, "LAYER_BITS", (3,))
    found, _ = evaluate_kv(model, READING, 0.005, layers=True)
    assert {(each.layer, each.kv) for each in found.layers} == {(layer, form) for layer in range(3) for form in ("k3v16", "k16v3")}
    together = sum(each.kl_mean for each in found.layers)
    assert found.formats[1].kl_mean == pytest.approx(together, rel=0.6)
    assert found.formats[0].kl_mean < together / 10


def test_formats_of_layers_are_those_of_all_where_all_have_the_same(model: Path) -> None:
    form = KVFormat(4, 4)
    with LLM(model, dtype="float32") as llm:
        graph = llm.loaded.model
        ids = list(range(3, 90))
        whole = kv._logprobs_with(graph, llm.dtype, ids, form, None)
        one = kv._logprobs_with(graph, llm.dtype, ids, form, 1)
        exact = kv._logprobs_with(graph, llm.dtype, ids, KVFormat(), None)
    assert mx.abs(one - exact).max().item() > 0
    assert mx.abs(whole - one).max().item() > 0


def test_what_auto_means() -> None:
    def loss(name: str, kl: float) -> KVLoss:
        return KVLoss(name, kl, None, kl, 1.0, None)

    formats = [loss("8", 1e-5), loss("k8v4", 0.002), loss("k5v4", 0.004), loss("4", 0.008)]
    assert choose(formats, 0.005) == ("k5v4", 0.004)
    assert choose(formats, 0.01) == ("4", 0.008)
    assert choose(formats, 1e-6) == ("16", 0.0)


def test_auto_is_what_was_measured_of_these_weights(model: Path, tmp_path: Path) -> None:
    form, line = kv_format("auto", model)
    assert not form.quantized
    assert "not measured" in line
    save_choice(model, "k5v4", 0.005, 0.004, {})
    form, line = kv_format("auto", model)
    assert form == KVFormat(5, 4)
    assert "0.004" in line
    with LLM(model, kv="auto") as llm:
        assert llm.kv == KVFormat(5, 4)
        assert any("kv auto: k5v4" in note for note in llm.notes)
    other = tiny_directory(tmp_path / "other", "gemma2", eos=False)
    assert not kv_format("auto", other)[0].quantized


def test_texts_of_a_page_show_nothing(model: Path) -> None:
    with pytest.raises(EvaluationError, match="page of 64"):
        evaluate_kv(model, Reading(positions=64, length=32), 0.005)
