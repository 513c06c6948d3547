"""8-bit floats whose scales are not powers of two: unpacked, or kept for the CPU kernels."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.formats.foreign import CASES, fp8, write_safetensors
from support.models.families import GOLDEN
from support.models.tiny import logits_of

from mlxinfer import kernels_cpu
from mlxinfer.errors import WeightsError
from mlxinfer.loading.directory import SafetensorsCheckpoint
from mlxinfer.loading.load import LoadedModel, load, prepare
from mlxinfer.nn.packing import holders
from mlxinfer.nn.weights import FLOAT8, Format, Quantized, numbers

OUT, COLUMNS = 160, 384
TOKENS = [(7 * i + 3) % 90 for i in range(20)]
needs_kernels = pytest.mark.skipif(not kernels_cpu.packs_float8(), reason="the CPU kernels are not there, or older than products with fp8")

GROUPS = {"fp8-block": 128, "fp8-small-block": 96, "fp8-row": 384, "fp8-tensor": 384, "fp8-scalar": 384, "compressed-fp8": 384}


@pytest.mark.parametrize(("name", "group"), GROUPS.items())
def test_the_numbers_are_those_of_the_unpacked_matrix(name: str, group: int, tmp_path: Path) -> None:
    encoded = CASES[name].encode(np.random.default_rng(5), OUT, COLUMNS)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": CASES[name].block}))
    write_safetensors(tmp_path / "model.safetensors", {f"m.{part}": tensor for part, tensor in encoded.parts.items()})
    unpacked, kept = SafetensorsCheckpoint(tmp_path), SafetensorsCheckpoint(tmp_path, float8=True)
    assert kept.stored("m.weight") == Format(8, group, FLOAT8)
    matrix = kept.read("m.weight")
    assert isinstance(matrix, Quantized)
    plain = np.array(numbers(unpacked.read("m.weight")))
    assert np.array_equal(np.array(numbers(matrix)), plain)
    part = kept.read_rows("m.weight", 30, 70)
    assert np.array_equal(np.array(numbers(part)), plain[30:70])


def test_powers_of_two_are_mlxs_own_format(tmp_path: Path) -> None:
    case = fp8("powers", scale_fmt="ue8m0")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": case.block}))
    encoded = case.encode(np.random.default_rng(5), OUT, COLUMNS)
    write_safetensors(tmp_path / "model.safetensors", {f"m.{part}": tensor for part, tensor in encoded.parts.items()})
    assert SafetensorsCheckpoint(tmp_path, float8=True).stored("m.weight") == Format(8, 32, "mxfp8")


def test_codes_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    codes, scales = np.full((32, 32), 0x7F, np.uint8), np.ones((1, 1), np.float32)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}))
    write_safetensors(tmp_path / "model.safetensors", {"m.weight": ("F8_E4M3", codes), "m.weight_scale_inv": ("F32", scales)})
    with pytest.raises(WeightsError, match=r"m\.weight holds NaN"):
        SafetensorsCheckpoint(tmp_path, float8=True).read("m.weight")


def quantized(target: Path, name: str, block: int | None) -> tuple[Path, Path]:
    """A golden model in 8-bit floats, with a scale per block or per matrix and one for activations, and the same numbers in float32."""
    weights = mx.load(str(GOLDEN / name / "model.safetensors"))
    assert isinstance(weights, dict)
    stored: dict[str, tuple[str, np.ndarray]] = {}
    plain: dict[str, mx.array] = {}
    for key, array in weights.items():
        plain[key] = array.astype(mx.float32)
        stored[key] = ("F32", np.array(plain[key]))
        is_matrix = array.ndim == 2 and "proj" in key and array.shape[-1] % 32 == 0
        if is_matrix:
            rows, columns = array.shape
            size = block or max(rows, columns)
            rng = np.random.default_rng(rows)
            scales = rng.uniform(1e-3, 3e-3, (-(-rows // size), -(-columns // size))).astype(np.float32)
            wide = np.repeat(np.repeat(scales, size, axis=0)[:rows], size, axis=1)[:, :columns]
            codes = mx.to_fp8(plain[key] / mx.array(wide))
            plain[key] = mx.from_fp8(codes, mx.float32) * mx.array(wide)
            stored[key] = ("F8_E4M3", np.array(codes))
            stored[f"{key}_scale_inv"] = ("F32", scales if block else scales.reshape(()))
            if not block:
                stored[key.replace("weight", "activation_scale")] = ("F32", np.float32(0.5).reshape(()))
    config = json.loads((GOLDEN / name / "config.json").read_text())
    method = {"quant_method": "fp8", "weight_block_size": [block, block] if block else None}
    for folder, changes in (("fp8", {"quantization_config": method}), ("plain", {})):
        (target / folder).mkdir()
        (target / folder / "config.json").write_text(json.dumps(config | changes))
    write_safetensors(target / "fp8" / "model.safetensors", stored)
    mx.save_safetensors(str(target / "plain" / "model.safetensors"), plain)
    return target / "fp8", target / "plain"


def bits(model: LoadedModel) -> list[int]:
    return [holder.matrix.layout.bits for holder in holders(model.model) if isinstance(holder.matrix, kernels_cpu.Packed)]


@pytest.mark.parametrize("block", [32, None])
@pytest.mark.parametrize("name", ["ministral3", "minimax_m2", "deepseek_v3"])
def test_a_model_computes_with_its_codes(name: str, block: int | None, tmp_path: Path) -> None:
    codes, plain = (load(path) for path in quantized(tmp_path, name, block))
    found, expected = logits_of(codes.model, TOKENS), logits_of(plain.model, TOKENS)
    assert np.abs(found - expected).max() < 2e-5 * np.abs(expected).max()
    if kernels_cpu.packs_float8():
        assert bits(codes).count(8) > 0
        assert codes.weight_bytes < plain.weight_bytes


@needs_kernels
def test_without_such_products_the_numbers_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, plain = quantized(tmp_path, "ministral3", 32)
    monkeypatch.setattr(kernels_cpu, "packs_float8", lambda: False)
    with prepare(path) as prepared:
        unpacked_size = next(change for change in prepared.size_changes if change.kind.startswith("F8_E4M3"))
    assert unpacked_size.reason == "unpacked to float32, as no product here reads them"
    assert unpacked_size.kept > 3 * unpacked_size.stored
    unpacked = load(path)
    assert 8 not in bits(unpacked)
    assert np.array_equal(logits_of(unpacked.model, TOKENS), logits_of(load(plain).model, TOKENS))
