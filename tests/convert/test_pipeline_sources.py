"""Checkpoints quantized by other tools become MLX directories, exactly if MLX has the format. The report states other losses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.formats.foreign import CASES, Case, Part, write_safetensors
from support.models.checkpoints import config_of, random_checkpoint
from support.oracles.plain_step import PlainCache
from support.processes.optional import Later

from mlxinfer.convert import Report, convert
from mlxinfer.errors import ConversionError, UnsupportedModelError, WeightsError
from mlxinfer.loading.directory import SafetensorsCheckpoint
from mlxinfer.loading.load import load
from mlxinfer.loading.safetensors import SafetensorsFile
from mlxinfer.nn.weights import Format, numbers

mlx_lm, mlx_lm_cache = Later("mlx_lm.utils"), Later("mlx_lm.models.cache")

IDS = np.random.default_rng(3).integers(3, 96, 24)
CONFIG = {
    "num_hidden_layers": 1,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 16,
}


@pytest.fixture(autouse=True)
def _activations_are_not_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXINFER_CPU_PRECISION", "float32")


def foreign(directory: Path, case: Case, dtype: str = "F16") -> tuple[Path, dict[str, np.ndarray]]:
    """Write a tiny Llama with quantized linear layers and the rest in `dtype`; return it with the numbers that the layers stand for."""
    plain = random_checkpoint(directory / "plain", config_of("llama", **CONFIG))
    rng = np.random.default_rng(2)
    stored: dict[str, Part] = {}
    truths = {}
    for name, array in mx.load(str(plain / "model.safetensors")).items():
        if "_proj" in name:
            base = name.removesuffix("weight")
            encoded = case.encode(rng, *array.shape)
            truths[name] = encoded.truth
            stored |= {base + ending: part for ending, part in (encoded.parts | case.extra).items()}
        elif dtype == "F32":
            stored[name] = ("F32", np.array(array))
        else:
            stored[name] = ("F16", np.array(array.astype(mx.float16)))
    source = directory / "source"
    source.mkdir()
    write_safetensors(source / "model.safetensors", stored)
    config = json.loads((plain / "config.json").read_text()) | {"torch_dtype": "float16"}
    (source / "config.json").write_text(json.dumps(config | ({"quantization_config": case.block} if case.block else {})))
    if case.sidecar:
        (source / "hf_quant_config.json").write_text(json.dumps(case.sidecar))
    return source, truths


def ours(directory: Path) -> np.ndarray:
    model = load(directory, dtype="float32").model
    step = PlainCache(model.layers).step([(0, len(IDS))])
    return np.array(model.logits(model.hidden(mx.array(IDS.astype(np.int32)), step)))


def theirs(directory: Path) -> np.ndarray:
    model, _ = mlx_lm.load_model(directory)
    model.set_dtype(mx.float32)
    return np.array(model(mx.array(IDS[None].astype(np.int32)), cache=mlx_lm_cache.make_prompt_cache(model))[0].astype(mx.float32))


def projections(report: Report) -> list[Any]:
    return [tensor for tensor in report.tensors if "_proj" in tensor.name]


FAST = ["gptq-symmetric", "gptq-act-4", "awq-gemm-64", "fp8-powers", "compressed-int8", "compressed-mxfp4", "modelopt-nvfp4-power",
        "bitsandbytes-double"]  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FAST else pytest.mark.long) for name in CASES])
def test_converted(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    source, truths = foreign(tmp_path, case)
    report = convert(source, tmp_path / "out", measure=False, **({} if case.form else {"dtype": "float32"}))
    written = SafetensorsCheckpoint(tmp_path / "out")
    for tensor in projections(report):
        assert written.stored(tensor.name) == (Format(*case.form) if case.form else mx.float32)
        assert tensor.origin == SafetensorsCheckpoint(source).kind(tensor.name)
        found, truth = np.array(numbers(written.read(tensor.name))), truths[tensor.name]
        error = float(np.linalg.norm(found - truth) / np.linalg.norm(truth))
        assert tensor.error == pytest.approx(error, rel=1e-3, abs=1e-7)
        if case.exact:
            assert tensor.loss == "exact"
            np.testing.assert_array_equal(found, truth.astype(np.float32))
        else:
            assert tensor.error < 2e-3
            assert tensor.loss in ("exact", "rounded")
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()
    converted = ours(tmp_path / "out")
    assert np.abs(converted - theirs(tmp_path / "out")).max() < 1e-3 * np.abs(converted).max()
    assert np.abs(converted - ours(source)).max() < (1e-3 if case.exact else 5e-2) * np.abs(converted).max()


def test_what_is_unpacked_and_quantized_again_says_so(tmp_path: Path) -> None:
    source, truths = foreign(tmp_path, CASES["gptq-act-4"])
    with pytest.raises(ConversionError, match=r"formats that MLX does not have \(GPTQ, 4 bits, act-order\).*Give bits"):
        convert(source, tmp_path / "out")
    report = convert(source, tmp_path / "out", bits=4, measure=False)
    assert {tensor.loss for tensor in projections(report)} == {"requantized"}
    assert any("requantized, which loses more than quantizing once: from GPTQ, 4 bits, act-order" in note for note in report.notes)
    written = SafetensorsCheckpoint(tmp_path / "out")
    for tensor in projections(report):
        found, truth = np.array(numbers(written.read(tensor.name))), truths[tensor.name]
        assert tensor.error == pytest.approx(float(np.linalg.norm(found - truth) / np.linalg.norm(truth)), rel=1e-2)


def test_kept_codes_are_named(tmp_path: Path) -> None:
    source, _ = foreign(tmp_path, CASES["gptq-4"])
    for asked in ({}, {"bits": 4}, {"bits": 8}):
        report = convert(source, tmp_path / str(len(asked) + sum(asked.values())), measure=False, **asked)
        assert {tensor.stored for tensor in projections(report)} == {"4-bit affine in groups of 128"}
        assert any("GPTQ, 4 bits in groups of 128, written as 4-bit affine in groups of 128" in note for note in report.notes)


@pytest.mark.parametrize("value", [0.0, 1e-4])
def test_biases_of_zeros_for_layers_that_have_none(tmp_path: Path, value: float) -> None:
    case = replace(CASES["gptq-symmetric"], extra={"bias": ("F16", np.full(128, value, np.float16))})
    source, _ = foreign(tmp_path, case)
    if value:
        with pytest.raises(WeightsError, match="bias is unexpected"):
            convert(source, tmp_path / "out")
        return
    report = convert(source, tmp_path / "out", measure=False)
    assert report.skipped["model.layers.0.mlp.up_proj.bias"] == "a bias of zeros"


def test_a_graph_of_mlx_lm_cannot_read_it(tmp_path: Path) -> None:
    source, _ = foreign(tmp_path, CASES["gptq-4"])
    config = json.loads((source / "config.json").read_text()) | {"model_type": "stablelm"}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="not by mlx-lm's graph of stablelm"):
        load(source)


def test_towers_are_kept_byte_for_byte(tmp_path: Path) -> None:
    """A packed tower is kept, too; only the text model is quantized."""
    source, _ = foreign(tmp_path, CASES["compressed-int4"], "F32")
    tensors: dict[str, Part] = {}
    checkpoint = SafetensorsCheckpoint(source)
    for name in checkpoint.tensors.names():
        tensors[name] = (checkpoint.tensors.info(name).dtype, checkpoint.tensors.codes(name).reshape(checkpoint.tensors.info(name).shape))
    rng = np.random.default_rng(1)
    packed = CASES["compressed-int4"].encode(rng, 64, 128).parts
    towers = {f"vision_tower.fc.{ending}": part for ending, part in packed.items()}
    towers["audio_tower.conv"] = ("BF16", rng.integers(0, 2**15, (3, 5, 7)).astype(np.uint16))
    towers["multi_modal_projector.scale"] = ("F32", np.array(3.5, np.float32))
    write_safetensors(source / "model.safetensors", tensors | towers)
    report = convert(source, tmp_path / "out", bits=4, measure=False)
    kept = {name: reason for name, reason in report.skipped.items() if "towers.safetensors" in reason}
    assert sorted(kept) == ["audio_tower.conv", "multi_modal_projector.scale", "vision_tower.fc.weight"]
    file = SafetensorsFile(tmp_path / "out" / "towers.safetensors")
    assert sorted(file.tensors) == sorted(towers)
    for name, (dtype, array) in towers.items():
        assert (file.tensors[name].dtype, file.tensors[name].shape) == (dtype, array.shape)
        assert file.read_codes(name, 0, (array.shape or (1,))[0]).tobytes() == array.tobytes()
    assert ours(tmp_path / "out").shape == (len(IDS), 96)
    mlx_lm.load_model(tmp_path / "out")
