"""Gemma 4's assistant drafts what transformers' drafts after the same tokens, whatever the pages and the steps before."""

import json
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.models.heads import assistant, model_with_assistant

from mlxinfer.cache.base import Segment
from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.cache.paged import PagedCache
from mlxinfer.errors import DraftError, MLXInferError
from mlxinfer.models.heads.gemma4_assistant import Assistant

NAMES = ["gemma4_text", "gemma4_text_shared"]


def said(model, ids, lengths, kv="16"):
    """Logits and rows of three turns after each length, the tokens read in pieces up to it."""
    cache = PagedCache(model.layers, dtype=mx.float32, kv_cache_tokens=1024, chunk=256, kv=KVFormat.parse(kv))
    slot, past, found = cache.open(), 0, []
    for length in lengths:
        step = cache.begin([Segment(slot, 0, length - past, past, length)])
        mx.eval(model.hidden(mx.array(ids[past:length], mx.int32), step), step.state)
        cache.commit(step, {slot: ids})
        past, token, row, turns = length, ids[length], cache.states(model.mtp.places.state, [slot])[:, 0], []
        for _ in range(3):
            step = cache.reading([Segment(slot, 0, 1, length, length + 1)])
            row, scores = model.draft(mx.array([token], mx.int32), row, step)
            token = int(scores.at(mx.argmax(scores.logits, axis=-1)).item())
            turns.append((np.array(scores.whole(model.vocab_size)[0]), np.array(row[0])))
        found.append(turns)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_it_drafts_what_transformers_drafts(name):
    golden = np.load(assistant(name) / "reference.npz")
    found = said(model_with_assistant(name), golden["ids"].tolist(), golden["lengths"].tolist())
    for turns, logits, rows in zip(found, golden["logits"], golden["rows"], strict=True):
        for (own, row), expected, its in zip(turns, logits, rows, strict=True):
            proposed = ~np.isneginf(own)
            assert proposed.sum() == (32 if name.endswith("shared") else 96)
            np.testing.assert_allclose(own[proposed], expected[proposed], atol=5e-4)
            np.testing.assert_allclose(row, its, atol=5e-4)
            if not proposed.all():  # transformers puts what it does not look at below all the others
                assert expected[~proposed].max() < expected[proposed].min()


def test_it_reads_sealed_pages_as_they_are():
    golden = np.load(assistant(NAMES[0]) / "reference.npz")
    ids, model = golden["ids"].tolist(), model_with_assistant(NAMES[0])
    (exact, after), (rounded, sealed) = (said(model, ids, [60, 97], kv) for kv in ("16", "8"))
    np.testing.assert_allclose(rounded[0][0], exact[0][0], atol=1e-6)
    assert 1e-5 < np.abs(sealed[0][0] - after[0][0]).max() < 0.5


def test_it_has_no_pages_of_its_own():
    with_it, without = model_with_assistant(NAMES[0]), model_with_assistant(NAMES[0], head=False)
    assert with_it.layers[: len(without.layers)] == without.layers
    assert [type(spec).__name__ for spec in with_it.layers[len(without.layers) :]] == ["RecurrentSpec"]
    assert isinstance(with_it.mtp, Assistant)
    assert with_it.mtp.reads == [1, 2]
    assert [block.mixer.layer for block in with_it.mtp.blocks] == [1, 1, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backbone_hidden_size": 48}, "rows of 48 channels, and the model has 32"),
        ({"text_config": {"vocab_size": 90}}, "vocabulary of 90 tokens, and the model has 96"),
        ({"text_config": {"sliding_window": 12}}, "a window of 12, and the model keeps 2 KV heads of 16 channels and a window of 24"),
        ({"text_config": {"head_dim": 32}}, "2 KV heads of 32 channels"),
        ({"text_config": {"hidden_size_per_layer_input": 8}}, "hidden_size_per_layer_input"),
        ({"text_config": {"num_kv_shared_layers": 2}}, "num_kv_shared_layers"),
        ({"text_config": {"rotate": 2}}, "rotate"),
        ({"text_config": 3}, "text_config"),
        ({"depth": 2}, "depth"),
        ({"use_ordered_embeddings": True, "num_centroids": 12, "centroid_intermediate_top_k": 4}, "token_ordering"),
        ({"use_ordered_embeddings": True, "num_centroids": 7}, "num_centroids"),
    ],
)
def test_one_that_does_not_fit_is_refused(change, message):
    with pytest.raises(MLXInferError, match=message):
        model_with_assistant(NAMES[0], **change)


def test_for_another_family_it_is_refused():
    with pytest.raises(DraftError, match="pages of a Gemma 4, and the model is llama"):
        model_with_assistant("llama", of=NAMES[0])


def test_files_that_are_not_whole_are_told(tmp_path: Path):
    """From directories, before any weights are read: one line each."""
    from support.engines.tiny_engine import GOLDEN

    from mlxinfer.loading.load import prepare

    def told(change) -> str:
        place = tmp_path / "assistant"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(assistant(NAMES[1]), place)
        change(place)
        with pytest.raises(MLXInferError) as raised, prepare(GOLDEN / NAMES[1], mtp=place):
            pass
        assert "\n" not in str(raised.value)
        return str(raised.value)

    def tensors(edit):
        def change(place):
            found = dict(mx.load(str(place / "model.safetensors")))
            edit(found)
            mx.save_safetensors(str(place / "new.safetensors"), found)
            (place / "new.safetensors").replace(place / "model.safetensors")

        return change

    def cut(place):
        file = place / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])

    assert "assistant" in told(cut)
    assert "post_projection.weight is missing" in told(tensors(lambda t: t.pop("post_projection.weight")))
    assert "model.norm.weight has shape [15]" in told(tensors(lambda t: t.update({"model.norm.weight": mx.zeros(15)})))
    assert "model.extra.weight is unexpected" in told(tensors(lambda t: t.update({"model.extra.weight": mx.zeros(15)})))
    ordering = "masked_embedding.token_ordering"
    assert "every token of the vocabulary once" in told(tensors(lambda t: t.update({ordering: mx.zeros(96, mx.int64)})))
    assert "list of whole numbers" in told(tensors(lambda t: t.update({ordering: mx.zeros(96)})))
    assert "token_ordering" in told(tensors(lambda t: t.pop(ordering)))
    config = json.loads((assistant(NAMES[1]) / "config.json").read_text())
    assert "channels" in told(lambda place: (place / "config.json").write_text(json.dumps(config | {"backbone_hidden_size": 8})))
