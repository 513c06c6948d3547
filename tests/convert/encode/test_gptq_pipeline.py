"""Models encoded by GPTQ while they read texts."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.models.checkpoints import GOLDEN, config_of, random_checkpoint

from mlxinfer.convert import convert
from mlxinfer.convert.calibrate.texts import Calibration
from mlxinfer.convert.encode import gptq_pipeline as encoded
from mlxinfer.convert.encode.gptq_pipeline import _PlaceInputs
from mlxinfer.convert.write.journal import Journal
from mlxinfer.errors import ConversionError
from mlxinfer.loading.directory import SafetensorsCheckpoint
from mlxinfer.nn.weights import Quantized, numbers


def texts(vocab: int = 96, count: int = 12, length: int = 40) -> Calibration:
    return Calibration(tuple(tuple(row) for row in np.random.default_rng(0).integers(3, vocab, (count, length)).tolist()), "some")


def small(tmp_path: Path, name: str = "llama", **changes: object) -> Path:
    return random_checkpoint(tmp_path / "source", config_of(name, **changes))


def tensors(directory: Path) -> dict[str, mx.array]:
    return {name: array for file in directory.glob("*.safetensors") for name, array in mx.load(str(file)).items()}


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gemma3_text", "qwen3_next", "gpt_oss"])
def test_every_matrix_is_encoded(tmp_path: Path, name: str) -> None:
    """The format is that of the weighted fit, with other codes and nearly the same weights."""
    source = small(tmp_path, name)
    report = convert(source, tmp_path / "gptq", bits=4, group_size=32, encoder="gptq", calibration=texts(), measure=False)
    plain = convert(source, tmp_path / "fit", bits=4, group_size=32, measure=False)
    assert [(t.name, t.stored) for t in report.tensors] == [(t.name, t.stored) for t in plain.tensors]
    ours, fitted = tensors(tmp_path / "gptq"), tensors(tmp_path / "fit")
    assert {key: (value.shape, value.dtype) for key, value in ours.items()} == {key: (v.shape, v.dtype) for key, v in fitted.items()}
    codes = [key for key in ours if ours[key].dtype == mx.uint32 and "embed" not in key and "experts" not in key and "switch" not in key]
    assert sum(not mx.array_equal(ours[key], fitted[key]).item() for key in codes) > len(codes) / 2
    for tensor, other in zip(report.tensors, plain.tensors, strict=True):
        assert tensor.error <= 2 * other.error + 1e-6, tensor.name


def test_the_outputs_of_layers_change_less(tmp_path: Path) -> None:
    """Measured on unread tokens, in the metric of the inputs that GPTQ minimises."""
    source = small(tmp_path, "llama", hidden_size=128, intermediate_size=256)
    convert(source, tmp_path / "gptq", bits=3, group_size=32, encoder="gptq", calibration=texts(count=60), measure=False)
    convert(source, tmp_path / "fit", bits=3, group_size=32, measure=False)
    from mlxinfer import LLM

    ids = np.random.default_rng(9).integers(3, 96, 200).tolist()
    exact, gptq, fit = (np.array(LLM(path, dtype="float32").logits(ids)) for path in (source, tmp_path / "gptq", tmp_path / "fit"))
    assert np.square(gptq - exact).sum() < 0.95 * np.square(fit - exact).sum()


def test_an_interrupted_run_goes_on_and_ends_in_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = small(tmp_path, num_hidden_layers=3)
    settings = {"bits": 4, "group_size": 32, "encoder": "gptq", "calibration": texts(), "measure": False}
    convert(source, tmp_path / "whole", **settings)
    done, plain = [], encoded._Encoder.finish

    def interrupted(self: encoded._Encoder, places: list) -> None:
        done.append(places)
        if len(done) == 2:
            raise KeyboardInterrupt
        plain(self, places)

    monkeypatch.setattr(encoded._Encoder, "finish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "pieces", **settings)
    blocks = []
    monkeypatch.setattr(encoded._Encoder, "finish", lambda self, places: (blocks.append(places), plain(self, places))[1])
    convert(source, tmp_path / "pieces", **settings)
    assert len(blocks) == 3, "the first block was encoded again"  # two blocks, and the head
    whole, pieces = tensors(tmp_path / "whole"), tensors(tmp_path / "pieces")
    assert all(mx.array_equal(whole[name], pieces[name]).item() for name in whole)
    assert whole.keys() == pieces.keys()


def test_gptq_is_left_where_it_loses_more_on_texts_kept_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a factor unrelated to the inputs, every matrix keeps the weighted fit."""
    real = encoded.factorize

    def wrong(hessian: np.ndarray, name: str) -> encoded.Factor:
        noise = np.random.default_rng(0).standard_normal((400, len(hessian))).astype(np.float32)
        noise[:, 1:] += noise[:, :1] * 2
        found = real(noise.T @ noise / 400, name)
        return encoded.Factor(found.order, found.upper, real(hessian, name).importance)

    monkeypatch.setattr(encoded, "factorize", wrong)
    source = small(tmp_path)
    report = convert(source, tmp_path / "out", bits=4, group_size=32, encoder="gptq", calibration=texts(), measure=False)
    assert any("keep the weighted fit: it loses less" in note for note in report.notes)


def test_experts_that_saw_little_have_the_weighted_fit(tmp_path: Path) -> None:
    source = small(tmp_path, "qwen3_moe")
    report = convert(source, tmp_path / "few", bits=4, group_size=32, encoder="gptq", calibration=texts(count=2), measure=False)
    assert any("experts keep the weighted fit: they saw too few" in note for note in report.notes)
    report = convert(source, tmp_path / "many", bits=4, group_size=32, encoder="gptq", calibration=texts(count=80), measure=False)
    assert sum("they saw too few" in note for note in report.notes) == 0 or _unseen(report.notes) < _all_experts(source)


def _unseen(notes: list[str]) -> int:
    return next(int(note.split()[0]) for note in notes if "too few" in note)


def _all_experts(source: Path) -> int:
    config = json.loads((source / "config.json").read_text())
    return 3 * config["num_experts"] * config["num_hidden_layers"]


def test_inputs_that_became_nan_name_the_tensor(tmp_path: Path) -> None:
    source = small(tmp_path, num_hidden_layers=1)
    plain = {name: numbers(SafetensorsCheckpoint(source).read(name)) for name in SafetensorsCheckpoint(source).names()}
    plain["model.layers.0.mlp.gate_proj.weight"] *= 1e30
    plain["model.layers.0.mlp.up_proj.weight"] *= 1e30
    mx.eval(list(plain.values()))
    for file in source.glob("*.safetensors"):
        file.unlink()
    mx.save_safetensors(str(source / "model.safetensors"), plain, {"format": "mlx"})
    with pytest.raises(ConversionError, match=r"inputs of model\.layers\.0\.mlp\.down_proj\.weight became NaN or infinite"):
        convert(source, tmp_path / "out", bits=4, group_size=32, dtype="float32", encoder="gptq", calibration=texts(), measure=False)


def test_a_head_is_encoded_with_what_it_reads(tmp_path: Path) -> None:
    for name in ("llama", "qwen3"):
        (tmp_path / name).mkdir()
        source = small(tmp_path / name, name)
        convert(source, tmp_path / name / "out", bits=4, group_size=32, encoder="gptq", calibration=texts(), measure=False)
        convert(source, tmp_path / name / "minmax", bits=4, group_size=32, encoder="minmax", measure=False)
        stored = SafetensorsCheckpoint(tmp_path / name / "out")
        head = next(n for n in ("lm_head.weight", "model.embed_tokens.weight") if n in stored.names())
        matrix = stored.read(head)
        assert isinstance(matrix, Quantized)
        other = SafetensorsCheckpoint(tmp_path / name / "minmax").read(head)
        assert not mx.array_equal(numbers(matrix), numbers(other)).item()


def test_inputs_of_experts_are_told_apart(tmp_path: Path) -> None:
    """Inputs arrive token by token, or once for each choice."""
    rng = np.random.default_rng(0)
    x, chosen = mx.array(rng.standard_normal((20, 8)).astype(np.float32)), mx.array(rng.integers(0, 4, (20, 2)))
    by_token, by_choice = _PlaceInputs(True), _PlaceInputs(True)
    by_token.add(x[:, None, None], chosen, 4, False)
    by_choice.add(mx.repeat(x[:, None, None], 2, axis=1), chosen, 4, False)
    for expert in range(4):
        wanted = np.array(x)[(np.array(chosen) == expert).any(-1)]
        assert np.array_equal(by_token.of_expert(expert)[0], wanted)
        assert len(by_choice.of_expert(expert)[0]) == (np.array(chosen) == expert).sum()


def test_encoded_tensors_are_forgotten_once_they_are_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path, {})
    journal.save("gptq a", {"0.0": mx.ones(3)}, {"error": 0.5, "pieces": 1, "fitted": 0, "unseen": 0})
    assert list((tmp_path / "states").iterdir())
    journal.forget("gptq a")
    assert not list((tmp_path / "states").iterdir())
    journal.close()
    assert GOLDEN.exists()
