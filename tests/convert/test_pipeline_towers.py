"""Conversions keep vision towers: our loader, and mlx-vlm's, read them again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map
from support.models.plain_weights import RandomWeights
from support.models.seeing import GOLDEN
from support.models.tiny import logits_of
from support.models.towers import distance

from mlxinfer.convert.pipeline import convert
from mlxinfer.errors import ConversionError
from mlxinfer.loading.directory import SafetensorsCheckpoint
from mlxinfer.loading.load import load
from mlxinfer.loading.safetensors import SafetensorsFile
from mlxinfer.loading.vision import Vision
from mlxinfer.models import supports
from mlxinfer.models.towers import tower_of
from mlxinfer.nn.weights import Format
from mlxinfer.vision.picture import read_picture

FAMILIES = sorted(
    path.parent.name
    for path in GOLDEN.glob("*/model.safetensors")
    if supports(json.loads((path.parent / "config.json").read_text())["model_type"])
)
TOKENS = list(range(3, 40))


def features(vision: Vision, family: str) -> mx.array:
    """Features of the first golden picture."""
    with np.load(GOLDEN / family / "reference.npz") as reference:
        pixels = vision.processor.pixels(read_picture(reference["one_image_0"]))
    return vision.tower.features(mx.array(pixels.normalized()), pixels.layout.pieces).features


def same(source: Path, written: Path, family: str) -> bool:
    """True if both directories give the same features and the same logits of a text."""
    one, other = (load(path, dtype="float32") for path in (source, written))
    assert isinstance(one.vision, Vision), one.vision
    assert isinstance(other.vision, Vision), other.vision
    assert mx.array_equal(features(one.vision, family), features(other.vision, family)).item()
    return bool(np.array_equal(logits_of(one.model, TOKENS), logits_of(other.model, TOKENS)))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_copy_sees_as_its_source_does(family: str, tmp_path: Path) -> None:
    # Norms of these families are stored as 1 + w, which 16 bits would round.
    report = convert(GOLDEN / family, tmp_path / "out", dtype="float32" if family.startswith("qwen3_5") else None)
    assert same(GOLDEN / family, tmp_path / "out", family)
    assert any("the vision tower takes" in note for note in report.notes)
    assert "mlx_vlm.generate --model ." in (tmp_path / "out" / "README.md").read_text()
    towers = SafetensorsFile(tmp_path / "out" / "towers.safetensors").tensors
    source = SafetensorsFile(GOLDEN / family / "model.safetensors").tensors
    assert {name: (entry.dtype, entry.shape) for name, entry in towers.items()} == {
        name: (entry.dtype, entry.shape) for name, entry in source.items() if name in towers
    }
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert {name for name, file in index.items() if file == "towers.safetensors"} == set(towers)


@pytest.mark.parametrize("family", ["smolvlm", "qwen3_vl"])
def test_only_the_text_model_is_quantized(family: str, tmp_path: Path) -> None:
    convert(GOLDEN / family, tmp_path / "out", bits=4, group_size=32, measure=False)
    loaded = load(tmp_path / "out", dtype="float32")
    assert isinstance(loaded.vision, Vision)
    with np.load(GOLDEN / family / "reference.npz") as reference:
        assert distance(features(loaded.vision, family), reference["one_features"]) < 1e-4
    again = convert(tmp_path / "out", tmp_path / "again")
    assert same(tmp_path / "out", tmp_path / "again", family)
    assert not again.skipped or set(again.skipped.values()) == {"kept in towers.safetensors"}


def test_calibration_reads_the_text_model_alone(tmp_path: Path) -> None:
    convert(GOLDEN / "smolvlm", tmp_path / "out", bits=4, group_size=32, encoder="gptq", calibration="random", measure=False)
    loaded = load(tmp_path / "out", dtype="float32")
    assert isinstance(loaded.vision, Vision)


def test_budgets_count_the_text_model_and_say_so(tmp_path: Path) -> None:
    report = convert(GOLDEN / "smolvlm", tmp_path / "out", bpw=15, measure=False)
    assert any("which bits per weight do not count" in note for note in report.notes)
    assert isinstance(load(tmp_path / "out").vision, Vision)


def test_the_text_model_alone(tmp_path: Path) -> None:
    convert(GOLDEN / "smolvlm", tmp_path / "out", towers="none")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert "vision_config" not in config
    assert not (tmp_path / "out" / "towers.safetensors").exists()
    one, other = (load(path, dtype="float32", vision="off").model for path in (GOLDEN / "smolvlm", tmp_path / "out"))
    assert np.array_equal(logits_of(one, TOKENS), logits_of(other, TOKENS))


def wide(target: Path) -> Path:
    """Write SmolVLM with a tower whose rows divide into groups of 64."""
    shutil.copytree(GOLDEN / "smolvlm", target, ignore=shutil.ignore_patterns("reference.npz"))
    config: dict[str, Any] = json.loads((target / "config.json").read_text())
    config["vision_config"] |= {"hidden_size": 64, "intermediate_size": 128}
    (target / "config.json").write_text(json.dumps(config))
    random = RandomWeights()
    tower_of(config, random)
    held = mx.load(str(target / "model.safetensors"))
    assert isinstance(held, dict)
    text = {name: tensor for name, tensor in held.items() if "vision_model" not in name and "connector" not in name}
    names = {name if name.startswith("model.") else f"model.{name}": matrix.weight for name, matrix in random.asked.items()}  # type: ignore[union-attr]
    mx.save_safetensors(str(target / "model.safetensors"), text | names, {"format": "pt"})
    return target


@pytest.mark.parametrize("bits", [None, 4])
def test_towers_in_8_bits(bits: int | None, tmp_path: Path) -> None:
    source = wide(tmp_path / "source")
    report = convert(source, tmp_path / "out", towers="8", bits=bits, group_size=None if bits is None else 32, measure=False)
    lost = next(note for note in report.notes if note.startswith("8 bits change the features"))
    assert 0 < float(lost.partition(" by ")[2].partition("%")[0]) < 5
    checkpoint = SafetensorsCheckpoint(tmp_path / "out")
    stored = {name: checkpoint.stored(name) for name in checkpoint.names() if "vision_model" in name or "connector" in name}
    packed = {name for name, form in stored.items() if isinstance(form, Format)}
    assert {stored[name] for name in packed} == {Format(8, 64)}
    assert len(packed) == 3 * 6
    assert all(".layers." in name for name in packed)
    one, other = (load(path, dtype="float32") for path in (source, tmp_path / "out"))
    assert isinstance(one.vision, Vision)
    assert isinstance(other.vision, Vision)
    assert 1e-5 < distance(features(other.vision, "smolvlm"), features(one.vision, "smolvlm")) < 0.1


def test_unknown_towers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="towers must be 16, 8 or none, not '4'"):
        convert(GOLDEN / "smolvlm", tmp_path / "out", towers="4")


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("family", ["smolvlm", "qwen3_vl"])
def test_mlx_vlm_reads_the_result(family: str, bits: int | None, tmp_path: Path) -> None:
    """Its features are those of transformers, and its logits those of our loader, on the same directory."""
    utils = pytest.importorskip("mlx_vlm.utils")
    convert(GOLDEN / family, tmp_path / "out", bits=bits, group_size=bits and 32, dtype="float32", measure=False)
    model, loaded = utils.load_model(tmp_path / "out"), load(tmp_path / "out", dtype="float32")
    model.update(tree_map(lambda a: a.astype(mx.float32) if a.dtype == mx.bfloat16 else a, model.parameters()))
    assert isinstance(loaded.vision, Vision)
    with np.load(GOLDEN / family / "reference.npz") as reference:
        pixels = loaded.vision.processor.pixels(read_picture(reference["one_image_0"]))
        values, ids = mx.array(pixels.normalized()), reference["one_input_ids"]
        more = {"image_grid_thw": mx.array(reference["one_image_grid_thw"])} if family == "qwen3_vl" else {}
        values = values if more else values[None]
        rows = model.get_input_embeddings(mx.array(ids)[None], values, **more).inputs_embeds[0]
        places = mx.array(np.flatnonzero(ids == loaded.vision.processor.image_token_id))
        assert distance(rows[places], reference["one_features"]) < 1e-4
        if bits is None:
            found = model(mx.array(ids)[None], pixel_values=values, mask=None, **more).logits[0].astype(mx.float32)
            assert distance(found[:, ::5], reference["one_logits"]) < 1e-4
    text = model(mx.array(TOKENS)[None], pixel_values=None, mask=None).logits[0].astype(mx.float32)
    assert distance(text, mx.array(logits_of(loaded.model, TOKENS))) < 1e-4
