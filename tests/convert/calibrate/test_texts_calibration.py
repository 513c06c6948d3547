"""Texts that a model reads before it is quantized."""

from __future__ import annotations

import json

import pytest
from support.models.checkpoints import GOLDEN

from mlxinfer.convert.calibrate import texts as module
from mlxinfer.convert.calibrate.texts import calibration, default_tokens, from_text, own_samples, random_ids
from mlxinfer.errors import TextError
from mlxinfer.evaluation.texts import SHIPPED_NAME, cut, read_texts, shared_share, shipped

WORDS = "the cat sat on the mat and looked at the moon over the sea while rain fell on "


@pytest.fixture
def tokenizer():
    return _Words()


class _Words:
    """A token for each word; every text starts with id 0."""

    bos_token_id = 0
    eos_token_ids = frozenset({1})

    def encode(self, text, *, add_special_tokens=True):
        return [0] * add_special_tokens + [2 + sum(word.encode()) % 200 for word in text.split()]


def test_random_ids_are_the_same_every_time():
    found = random_ids(300, 1024)
    assert found == random_ids(300, 1024)
    assert found != random_ids(300, 1024, seed=1)
    assert found.tokens == 1024
    assert {len(text) for text in found.texts} == {512}
    assert max(map(max, found.texts)) < 300


def test_samples_are_the_models_own_and_repeatable():
    told = []
    found = own_samples(GOLDEN / "llama", 160, length=32, progress=lambda done, total: told.append((done, total)))
    assert found == own_samples(GOLDEN / "llama", 160, length=32)
    assert found.texts != own_samples(GOLDEN / "llama", 160, length=32, seed=1).texts
    assert found.tokens == 160
    assert len(set(found.texts)) == 5
    assert told[-1] == (160, 160)


def test_samples_do_not_depend_on_how_many_are_written_together(monkeypatch):
    together = own_samples(GOLDEN / "llama", 160, length=32)
    monkeypatch.setattr(module, "_TOGETHER", 2)
    assert own_samples(GOLDEN / "llama", 160, length=32) == together


def test_fewer_tokens_for_larger_models():
    sizes = [default_tokens(parameters) for parameters in (10**6, 10**9, 10**10, 10**12)]
    assert sizes == sorted(sizes, reverse=True)
    assert (sizes[0], sizes[-1]) == (49_152, 4_096)


def test_texts_of_every_kind(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text(WORDS * 100)
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps({"text": WORDS * 50, "id": number}) for number in range(3)))
    (tmp_path / "c.json").write_text("{}")
    (tmp_path / ".hidden.txt").write_text("not this")
    assert [len(read_texts(tmp_path / name, 10**6)) for name in ("a.txt", "b.jsonl", "")] == [1, 3, 4]
    found = from_text(tmp_path, tokenizer, 2048)
    assert found.tokens == 2048
    assert "2048 tokens" in found.name
    assert not found.notes
    assert all(text[0] == 0 for text in found.texts)
    assert found == from_text(tmp_path, tokenizer, 2048)
    assert "wanted" in from_text(tmp_path / "a.txt", tokenizer, 10**5).notes[0]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.txt", "", "no text"),
        ("a.txt", "two words", "too few"),
        ("a.bin", "x", "no known kind"),
        ("a.jsonl", '{"prompt": 1}\n', "needs a field"),
        ("a.jsonl", "{\n", "line 1"),
        ("a.txt", b"\xff\xfe", "UTF-8"),
    ],
)
def test_what_is_no_text_is_said_clearly(tmp_path, tokenizer, name, text, says):
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(TextError, match=says):
        from_text(tmp_path / name, tokenizer, 1024)


def test_nothing_is_downloaded(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(TextError, match="hub's cache"):
        from_text("org/some-texts", tokenizer, 1024)
    with pytest.raises(TextError, match="no such file or folder"):
        from_text(tmp_path / "none.txt", tokenizer, 1024)


def test_a_data_set_in_the_hubs_cache(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "datasets--org--some-texts" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "a.txt").write_text(WORDS * 100)
    assert from_text("org/some-texts", tokenizer, 1024).tokens == 1024


def test_windows_are_spread_over_the_texts(tokenizer):
    texts = [WORDS * 10, WORDS * 2, WORDS * 10]
    found = cut(tokenizer, texts, "some", positions=200, length=50)
    assert [window.text for window in found.windows] == [0, 1, 2, 0, 2]
    assert found.positions == sum(len(window.ids) for window in found.windows) <= 200
    assert all(window.ids[0] == 0 for window in found.windows)
    assert found.digest != cut(tokenizer, texts, "some", positions=150, length=50).digest


def test_overlap_is_found(tokenizer):
    windows = cut(tokenizer, [" ".join(f"{word}{number}" for number in range(60) for word in "ab")], "some", positions=100, length=50)
    assert shared_share(windows, [windows.windows[0].ids]) == 1 / len(windows.windows)
    assert shared_share(windows, [range(100, 200)]) == 0.0


def test_the_shipped_text_is_long_enough():
    texts = shipped()
    assert len(texts) == 32
    assert min(map(len, texts)) > 2800
    assert SHIPPED_NAME


def test_what_calibrates_has_a_name(tmp_path):
    assert calibration("random", GOLDEN / "llama", 256, 1024) == random_ids(256, 1024)
    with pytest.raises(TextError, match="no tokenizer"):
        calibration(tmp_path, GOLDEN / "llama", 256, 1024)
