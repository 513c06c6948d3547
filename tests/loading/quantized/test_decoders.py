"""Every layout of other tools gives the float64 numbers that it was packed from, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.formats.foreign import CASES, Case, Part, fp8, write_safetensors

from mlxinfer.errors import CheckpointError, MLXInferError, UnsupportedModelError, WeightsError
from mlxinfer.loading.directory import SafetensorsCheckpoint
from mlxinfer.nn.weights import Format, Quantized, numbers

OUT, COLUMNS = 160, 384


def written(directory: Path, case: Case, tensors: dict[str, Part], **config: Any) -> SafetensorsCheckpoint:
    block = {"quantization_config": case.block} if case.block else {}
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", **block, **config}))
    if case.sidecar:
        (directory / "hf_quant_config.json").write_text(json.dumps(case.sidecar))
    write_safetensors(directory / "model.safetensors", tensors)
    return SafetensorsCheckpoint(directory)


def agree(found: np.ndarray, truth: np.ndarray, case: Case) -> None:
    """Bit for bit, except that a float32 scale times a code is rounded, and its bias too."""
    np.testing.assert_allclose(found, truth, rtol=0, atol=2e-7 * np.abs(truth).max() if case.wide_scales else 0)


def opened(directory: Path, case: Case) -> tuple[SafetensorsCheckpoint, np.ndarray]:
    encoded = case.encode(np.random.default_rng(5), OUT, COLUMNS)
    tensors = {f"m.{name}": part for name, part in encoded.parts.items()}
    checkpoint = written(directory, case, tensors | {"norm": ("F32", np.ones(4, np.float32))})
    return checkpoint, encoded.truth.astype(np.float32)


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_the_numbers_are_exact(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    checkpoint, truth = opened(tmp_path, case)
    assert sorted(checkpoint.names()) == ["m.weight", "norm"]
    assert checkpoint.shape("m.weight") == (OUT, COLUMNS)
    assert checkpoint.stored("m.weight") == (Format(*case.form) if case.form else mx.float32)
    matrix = checkpoint.read("m.weight")
    if case.form:
        assert isinstance(matrix, Quantized)
        assert matrix.format == Format(*case.form)
    agree(np.array(numbers(matrix)), truth, case)
    assert (checkpoint.unpacked_from("m.weight") is None) == (case.form is not None)
    assert checkpoint.unpacked_from("norm") is None
    encoded = case.encode(np.random.default_rng(5), OUT, COLUMNS)
    assert checkpoint.nbytes("m.weight") == sum(array.nbytes for _, array in encoded.parts.values())


@pytest.mark.parametrize("name", CASES)
def test_rows_by_themselves(tmp_path: Path, name: str) -> None:
    checkpoint, truth = opened(tmp_path, CASES[name])
    for first, last in ((0, 1), (3, 21), (32, 64), (157, OUT)):
        agree(np.array(numbers(checkpoint.read_rows("m.weight", first, last))), truth[first:last], CASES[name])


@pytest.mark.parametrize(("scales", "settings"), [("block", {}), ("powers", {"scale_fmt": "ue8m0"}), ("tensor", {})])
@pytest.mark.parametrize("shape", [(130, 96), (32, 160)])
def test_eight_bits_in_other_sizes_and_for_experts(tmp_path: Path, scales: str, settings: dict[str, Any], shape: tuple[int, int]) -> None:
    """Blocks at the edges are smaller. Experts are one tensor of three axes."""
    case = fp8(scales, (64, 64), **settings)
    experts = [case.encode(np.random.default_rng(seed), *shape) for seed in (1, 2, 3)]
    parts = {name: (dtype, np.stack([expert.parts[name][1] for expert in experts])) for name, (dtype, _) in experts[0].parts.items()}
    checkpoint = written(tmp_path, case, {"m.weight": parts["weight"], "m.weight_scale_inv": parts["weight_scale_inv"]})
    truth = np.stack([expert.truth for expert in experts]).astype(np.float32)
    np.testing.assert_array_equal(np.array(numbers(checkpoint.read("m.weight"))), truth)
    np.testing.assert_array_equal(np.array(numbers(checkpoint.read_rows("m.weight", 1, 3))), truth[1:])


REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({"quant_method": method, "bits": 4}, method) for method in ("bitnet", "quanto", "hqq", "aqlm", "mxfp4", "exl3")),
    ({"quant_method": "gptq", "bits": 5}, "5 bits"),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "marlin"),
    ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "cannot be read"),
    ({"quant_method": "awq", "bits": 3, "group_size": 128}, "3 bits"),
    ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv_fast"}, "gemv_fast"),
    ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "marlin-24"),
    ({"quant_method": "compressed-tensors", "format": "dense", "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24"),
    ({"quant_method": "compressed-tensors", "format": "dense", "transform_config": {"a": 1}}, "transforms"),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "W4A8_AWQ"),
    ({"quant_method": "fp8"}, "no tensor is in a layout"),
    ({"quant_method": "bitsandbytes"}, "no tensor is in a layout"),
]


@pytest.mark.parametrize(("block", "said"), REFUSED, ids=str)
def test_what_is_not_known_is_refused_before_anything_is_read(tmp_path: Path, block: dict[str, Any], said: str) -> None:
    tensors = {"m.qweight": ("I32", np.zeros((4, 32), np.int32))} if "bits" in block else {"m.weight": ("F32", np.ones((2, 2), np.float32))}
    with pytest.raises(UnsupportedModelError, match=said) as caught:
        written(tmp_path, Case(block, lambda *_: pytest.fail("not used")), tensors)
    assert "\n" not in str(caught.value)
    if said == block["quant_method"]:
        assert "gptq" in str(caught.value)
        assert "original" in str(caught.value)


def test_gptqmodels_rules_for_single_modules(tmp_path: Path) -> None:
    case, other = CASES["gptq-4-64"], CASES["gptq-8"]
    first, second = (c.encode(np.random.default_rng(1), OUT, COLUMNS) for c in (case, other))
    tensors = {f"layers.{n}.{name}": part for n, e in enumerate((first, second)) for name, part in e.parts.items()}
    block = case.block | {"dynamic": {r"-:.*\.9\.": {}, r"+:.*\.1": {"bits": 8, "group_size": 128}}}
    checkpoint = written(tmp_path, Case(block, case.encode), tensors)
    np.testing.assert_array_equal(np.array(numbers(checkpoint.read("layers.0.weight"))), first.truth.astype(np.float32))
    np.testing.assert_array_equal(np.array(numbers(checkpoint.read("layers.1.weight"))), second.truth.astype(np.float32))


def test_scales_that_contradict_their_declaration(tmp_path: Path) -> None:
    case = fp8("block", scale_fmt="ue8m0")
    checkpoint, _ = opened(tmp_path, case)
    with pytest.raises(CheckpointError, match="no power of two"):
        checkpoint.read("m.weight")


def test_a_nan_in_eight_bits(tmp_path: Path) -> None:
    case = CASES["fp8-powers"]
    encoded = case.encode(np.random.default_rng(5), OUT, COLUMNS)
    encoded.parts["weight"][1][3, 4] = 0xFF
    checkpoint = written(tmp_path, case, {f"m.{name}": part for name, part in encoded.parts.items()})
    with pytest.raises(WeightsError, match="NaN"):
        checkpoint.read("m.weight")


@pytest.mark.parametrize(("name", "part"), [
    ("gptq-4", "qzeros"), ("gptq-4", "scales"), ("awq-gemm-64", "qzeros"), ("awq-gemv-64", "scales"), ("fp8-block", "weight_scale_inv"),
    ("compressed-int4", "weight_scale"), ("compressed-int4", "weight_shape"), ("compressed-nvfp4", "weight_global_scale"),
    ("bitsandbytes-nf4", "weight.absmax"), ("bitsandbytes-int8", "SCB"),
])  # fmt: skip
@pytest.mark.parametrize("damage", ["missing", "shape"])
def test_parts_that_do_not_fit(tmp_path: Path, name: str, part: str, damage: str) -> None:
    case = CASES[name]
    encoded = case.encode(np.random.default_rng(5), OUT, COLUMNS)
    tensors = {f"m.{ending}": stored for ending, stored in encoded.parts.items()}
    dtype, array = tensors.pop(f"m.{part}")
    if damage == "shape":
        tensors[f"m.{part}"] = (dtype, np.concatenate([array.reshape(-1), array.reshape(-1)]))
    with pytest.raises(MLXInferError) as caught:
        written(tmp_path, case, tensors).read("m.weight")
    assert "\n" not in str(caught.value)


def test_a_group_that_is_not_there(tmp_path: Path) -> None:
    case = CASES["gptq-act-4"]
    encoded = case.encode(np.random.default_rng(5), OUT, COLUMNS)
    encoded.parts["g_idx"][1][7] = 99
    checkpoint = written(tmp_path, case, {f"m.{name}": part for name, part in encoded.parts.items()})
    with pytest.raises(CheckpointError, match="g_idx names a group"):
        checkpoint.read("m.weight")
