"""GPTQ with inputs from the part of the model that is rounded already."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.checkpoints import config_of, random_checkpoint

from mlxinfer.convert import convert, encoded, stream
from mlxinfer.convert.batches import batches
from mlxinfer.convert.calibration import Calibration
from mlxinfer.convert.encoded import _correction, _Encoder
from mlxinfer.loading.load import open_checkpoint

SMALL: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 32}


@pytest.fixture(autouse=True)
def follow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoded, "FOLLOW", True)


def texts(count: int = 24) -> Calibration:
    ids = np.random.default_rng(0).integers(3, 96, (count, 40))
    return Calibration(tuple(map(tuple, ids.tolist())), "some")


def plan_of_layers(source: Path, file: Path) -> Path:
    """3 bits for the layers; the embedding and the head as they are."""
    checkpoint = open_checkpoint(source)
    matrices = [name for name in checkpoint.names() if len(checkpoint.shape(name)) == 2]
    checkpoint.close()
    file.write_text(json.dumps({"tensors": {name: {"bits": 3, "group_size": 32} if ".layers." in name else False for name in matrices}}))
    return file


def test_what_follows_is_what_the_converted_model_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The states of the rounded model after the last block, against those of what was written, read again."""
    source = random_checkpoint(tmp_path / "source", config_of("llama", **SMALL))
    readers: list[stream._Reader] = []
    init = stream._Reader.__init__
    monkeypatch.setattr(stream, "default_dtype", lambda: mx.float32)
    monkeypatch.setattr(stream._Reader, "__init__", lambda self, *args: (readers.append(self), init(self, *args))[1])
    plan = plan_of_layers(source, tmp_path / "plan.json")
    convert(source, tmp_path / "out", plan=plan, encoder="gptq", calibration=texts(), measure=False)
    followed, plain = readers[0]._followers, readers[0]._states

    class Nothing:
        def place(self, names: list[str]) -> None: ...
        def done(self, places: list) -> None: ...

    checkpoint = open_checkpoint(tmp_path / "out")
    stream.read_through(checkpoint, batches(texts().texts, held_out=1), Nothing())
    for ours, other, expected in zip(followed, plain, readers[1]._states, strict=True):
        scale = float(mx.abs(expected).max())
        assert float(mx.abs(ours - expected).max()) < 2e-2 * scale
        assert float(mx.square(ours - expected).mean()) < 0.01 * float(mx.square(other - expected).mean())


def test_the_correction_is_that_of_least_squares() -> None:
    """W + W M has, of the inputs x, nearly the outputs that W has of y; half of the correction goes half of the way."""
    rng = np.random.default_rng(1)
    y = rng.normal(size=(4000, 24)).astype(np.float32) * np.linspace(0.1, 3, 24, dtype=np.float32)
    x = (y + 0.3 * y @ rng.normal(size=(24, 24)).astype(np.float32) / 5).astype(np.float32)
    correction = _correction(y.T @ x / len(x), x.T @ x / len(x)) / encoded._SHARE
    weight = rng.normal(size=(8, 24)).astype(np.float32)
    before, after = x @ weight.T - y @ weight.T, x @ (weight + weight @ correction).T - y @ weight.T
    assert np.square(after).sum() < 0.02 * np.square(before).sum()


def test_an_interrupted_run_ends_in_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = random_checkpoint(tmp_path / "source", config_of("llama", **SMALL))
    settings: dict[str, Any] = {"bits": 4, "group_size": 32, "encoder": "gptq", "calibration": texts(), "measure": False}
    report = convert(source, tmp_path / "whole", **settings)
    assert any("make up for what those before them do" in note for note in report.notes)
    done, plain = [], _Encoder.done

    def interrupted(self: _Encoder, places: list) -> None:
        done.append(places)
        if len(done) == 2:
            raise KeyboardInterrupt
        plain(self, places)

    with monkeypatch.context() as patched:
        patched.setattr(_Encoder, "done", interrupted)
        with pytest.raises(KeyboardInterrupt):
            convert(source, tmp_path / "pieces", **settings)
    convert(source, tmp_path / "pieces", **settings)
    whole, pieces = (mx.load(str(tmp_path / name / "model.safetensors")) for name in ("whole", "pieces"))
    assert all(mx.array_equal(array, pieces[name]) for name, array in whole.items())


@pytest.mark.parametrize("name", ["qwen3_moe", "gemma3_text"])
def test_families_with_experts_and_other_norms_are_followed(tmp_path: Path, name: str) -> None:
    source = random_checkpoint(tmp_path / "source", config_of(name))
    report = convert(source, tmp_path / "out", bits=4, group_size=32, encoder="gptq", calibration=texts(8), measure=False)
    quantized = [tensor for tensor in report.tensors if tensor.error]
    assert quantized
    assert all(tensor.error < 0.5 for tensor in quantized)
    assert all(tensor.error < 0.15 for tensor in quantized if "embed" in tensor.name)
