"""Models load with their vision tower, or say why they cannot see images."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.models.seeing import GOLDEN
from support.models.towers import distance

from mlxinfer.config import EngineArgs
from mlxinfer.engine.llm import LLM
from mlxinfer.errors import AdapterError, CheckpointError, MLXInferError, SettingError, UnsupportedModelError, WeightsError
from mlxinfer.loading.find.catalog import describe
from mlxinfer.loading.load import load, meta_model
from mlxinfer.loading.vision import Vision, image_budget
from mlxinfer.models import supports
from mlxinfer.vision.picture import read_picture

FAMILIES = sorted(
    path.parent.name
    for path in GOLDEN.glob("*/model.safetensors")
    if supports(json.loads((path.parent / "config.json").read_text())["model_type"])
)
"""Without those whose text model runs on mlx-lm's graph."""
TEXT = Path(__file__).parents[1] / "golden" / "arch" / "llama"


def features_of(vision: Vision, family: str, case: str) -> tuple[mx.array, np.ndarray[Any, Any]]:
    """Features of a golden case, and those of transformers."""
    with np.load(GOLDEN / family / "reference.npz") as reference:
        pictures = [reference[name] for name in sorted(reference.files) if name.startswith(f"{case}_image_") and name[-1].isdecimal()]
        found = [vision.processor.pixels(read_picture(picture)) for picture in pictures]
        rows = [vision.tower.features(mx.array(pixels.normalized()), pixels.layout.pieces).features for pixels in found]
        return mx.concatenate(rows), reference[f"{case}_features"]


def copied(family: str, target: Path, change: Callable[[dict[str, mx.array]], dict[str, mx.array]] | None = None, **config: Any) -> Path:
    """Copy a golden checkpoint with changed tensors and other keys of the config."""
    shutil.copytree(GOLDEN / family, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("reference.npz"))
    if config:
        whole = json.loads((target / "config.json").read_text()) | config
        (target / "config.json").write_text(json.dumps(whole))
    if change:
        tensors = mx.load(str(target / "model.safetensors"))
        assert isinstance(tensors, dict)
        mx.save_safetensors(str(target / "model.safetensors"), change(tensors), {"format": "pt"})
    return target


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_sees(family: str) -> None:
    loaded = load(GOLDEN / family, dtype="float32")
    assert isinstance(loaded.vision, Vision), loaded.vision
    assert loaded.vision.weight_bytes > 0
    assert not any("images" in note or "text model" in note for note in loaded.notes)
    for case in ("one", "two"):
        found, expected = features_of(loaded.vision, family, case)
        # Pillow differs from torchvision by two levels of 255, and the references of these two are torchvision's.
        assert distance(found, expected) < (3e-2 if family in ("lfm2_vl", "gemma4_unified") else 1e-4)


@pytest.mark.parametrize("family", ["smolvlm", "gemma4_e"])
def test_without_vision_only_the_text_model_is_loaded(family: str) -> None:
    seeing, blind = meta_model(GOLDEN / family, dtype="float32"), load(GOLDEN / family, dtype="float32", vision="off")
    assert not isinstance(seeing.vision, str)
    assert blind.vision == "the model cannot see images: it was loaded without its vision tower (vision=off, --no-vision)"
    assert blind.vision in blind.notes
    assert any(note.endswith("tensors are not used: only the text model is used") for note in blind.notes)
    with LLM(GOLDEN / family, vision="off") as off, LLM(GOLDEN / family) as on:
        assert on.plan.images is not None
        assert off.plan.images is None
        assert on.memory_bytes - off.memory_bytes > seeing.vision.weight_bytes
        answers = [llm.generate(["ab"], max_tokens=8, temperature=0)[0].token_ids for llm in (off, on)]
        assert answers[0] == answers[1] != []


def test_text_models_cannot_see() -> None:
    loaded = load(TEXT)
    assert loaded.vision == "the model cannot see images: it is a text model"
    assert loaded.vision not in loaded.notes
    with pytest.raises(UnsupportedModelError, match="it is a text model"):
        load(TEXT, vision="on")


def without(part: str) -> Callable[[dict[str, mx.array]], dict[str, mx.array]]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if part not in name}


def misshaped(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    return {name: tensor[:-1] if "post_layernorm" in name else tensor for name, tensor in tensors.items()}


def extended(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    return tensors | {"model.vision_model.extra.weight": mx.ones(3)}


def _bad_json(directory: Path) -> None:
    (directory / "preprocessor_config.json").write_text("{")


def _other_filter(directory: Path) -> None:
    path = directory / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"do_center_crop": True}))


def _no_processor(directory: Path) -> None:
    (directory / "preprocessor_config.json").unlink()


DAMAGED: dict[str, tuple[Callable[[Path], Any], str, type[MLXInferError]]] = {
    "no tower": (lambda path: copied("smolvlm", path, without("vision_model")), "embeddings.*is missing", WeightsError),
    "neither tower nor connector": (
        lambda path: copied("smolvlm", path, lambda tensors: without("connector")(without("vision_model")(tensors))),
        "its files have no vision tower",
        WeightsError,
    ),
    "a missing tensor": (lambda path: copied("smolvlm", path, without("layers.1.mlp.fc1.weight")), r"layers\.1\.mlp\.fc1", WeightsError),
    "a shape": (lambda path: copied("smolvlm", path, misshaped), r"post_layernorm.* has shape \[47\], expected \[48\]", WeightsError),
    "another tensor": (lambda path: copied("smolvlm", path, extended), r"vision_model\.extra\.weight is unexpected", WeightsError),
    "no processor": (lambda path: _no_processor(copied("smolvlm", path)), "has no preprocessor_config.json", CheckpointError),
    "a damaged processor": (lambda path: _bad_json(copied("smolvlm", path)), "preprocessor_config.json cannot be read", CheckpointError),
    "an odd processor": (lambda path: _other_filter(copied("smolvlm", path)), "do_center_crop is true", UnsupportedModelError),
    "an unsupported tower": (
        lambda path: copied("smolvlm", path, vision_config={"model_type": "smolvlm_vision", "pooling": "odd"}),
        "pooling",
        UnsupportedModelError,
    ),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_tower_leaves_the_text_model(damage: str, tmp_path: Path) -> None:
    spoil, reason, kind = DAMAGED[damage]
    spoil(tmp_path)
    loaded = load(tmp_path, dtype="float32")
    assert isinstance(loaded.vision, str)
    assert loaded.vision in loaded.notes
    with pytest.raises(kind, match=reason) as caught:
        load(tmp_path, dtype="float32", vision="on")
    assert str(caught.value) == loaded.vision


def test_a_tower_with_infinite_values_is_refused(tmp_path: Path) -> None:
    path = copied("smolvlm", tmp_path, lambda tensors: tensors | {"model.vision_model.post_layernorm.bias": mx.full((48,), float("inf"))})
    with pytest.raises(WeightsError, match=r"post_layernorm\.bias holds NaN or infinite values"):
        load(path, dtype="float32")
    assert isinstance(load(path, dtype="float32", vision="off").vision, str)


def test_a_quantized_directory(tmp_path: Path) -> None:
    """Matrices of the projector, with its bias, and of the text model are stored in 8 bits."""

    def quantized(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
        found = {}
        for name, tensor in tensors.items():
            found[name] = tensor
            if tensor.ndim == 2 and tensor.shape[1] % 32 == 0 and "embedding" not in name:
                place = name.removesuffix(".weight")
                found[name], found[f"{place}.scales"], found[f"{place}.biases"] = mx.quantize(tensor, group_size=32, bits=8)
        assert "multi_modal_projector.linear_1.scales" in found
        return found

    path = copied("internvl", tmp_path, quantized, quantization={"group_size": 32, "bits": 8})
    loaded = load(path, dtype="float32")
    assert isinstance(loaded.vision, Vision), loaded.vision
    found, expected = features_of(loaded.vision, "internvl", "one")
    assert 1e-5 < distance(found, expected) < 3e-2


def test_the_tower_is_in_the_dtype_of_the_activations() -> None:
    for asked, dtype in (("bfloat16", mx.bfloat16), ("float32", mx.float32), ("float16", mx.bfloat16)):
        found = meta_model(GOLDEN / "smolvlm", dtype=asked).vision
        assert not isinstance(found, str)
        assert found.dtype == dtype


def test_weights_that_are_quantized_while_loading_leave_the_tower() -> None:
    loaded = load(GOLDEN / "qwen3_vl", dtype="float32", bits=8, group_size=32)
    assert isinstance(loaded.vision, Vision)
    found, expected = features_of(loaded.vision, "qwen3_vl", "one")
    assert distance(found, expected) < 1e-4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vision": "maybe"}, "vision must be auto, on or off, not 'maybe'"),
        ({"vision": "off", "max_pixels": 5}, "max_pixels is for images, which vision=off"),
        ({"vision": "off", "mmproj": "x.gguf"}, "mmproj is for images"),
        ({"max_pixels": 0}, "max_pixels must be a whole number of at least 1"),
        ({"max_pixels": 5, "min_pixels": 6}, r"min_pixels is 6, above max_pixels \(5\)"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        EngineArgs("x", **settings)


def test_limits_belong_to_models_that_follow_them() -> None:
    vision = meta_model(GOLDEN / "gemma3").vision
    with pytest.raises(SettingError, match="max_pixels does not apply to this model: its images have a fixed size"):
        image_budget(vision, 1000, None)
    with pytest.raises(SettingError, match="min_pixels is for images, but the model cannot see images: it is a text model"):
        image_budget(meta_model(TEXT).vision, None, 1000)
    with pytest.raises(SettingError, match="max_pixels is for images"):
        LLM(TEXT, max_pixels=1000)


def test_the_summary_names_the_tower() -> None:
    found, text = describe(GOLDEN / "smolvlm"), describe(TEXT)
    planned = meta_model(GOLDEN / "smolvlm", dtype="bfloat16").vision
    assert not isinstance(planned, str)
    assert (found.tower_bytes, found.blind) == (planned.weight_bytes, "")
    assert (text.tower_bytes, text.blind) == (0, "the model cannot see images: it is a text model")


def test_adapters_of_a_tower_are_refused_by_name(tmp_path: Path) -> None:
    layer = "base_model.model.model.vision_model.encoder.layers.0.self_attn.q_proj"
    mx.save_safetensors(
        str(tmp_path / "adapter_model.safetensors"),
        {f"{layer}.lora_A.weight": mx.ones((2, 48)), f"{layer}.lora_B.weight": mx.ones((48, 2))},
    )
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(AdapterError, match=r"q_proj.* is for the vision tower: only the text model can have adapters"):
        LLM(GOLDEN / "smolvlm", adapters={"eyes": tmp_path})


NAMES: dict[str, tuple[str, dict[str, str]]] = {
    "smolvlm in mlx-vlm": (
        "smolvlm",
        {"model.text_model.": "language_model.", "model.": "", "lm_head.": "language_model.lm_head."},
    ),
    "qwen3_vl in mlx-vlm": (
        "qwen3_vl",
        {"model.visual.": "vision_tower.", "model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
    ),
    "gemma3 in transformers 5": (
        "gemma3",
        {
            "vision_tower.vision_model.": "model.vision_tower.",
            "multi_modal_projector.": "model.multi_modal_projector.",
            "language_model.model.": "model.language_model.",
            "language_model.lm_head.": "lm_head.",
        },
    ),
}
"""Prefixes of names in a golden checkpoint, and in another style."""


@pytest.mark.parametrize("style", NAMES)
def test_other_names(style: str, tmp_path: Path) -> None:
    family, prefixes = NAMES[style]

    def renamed(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
        found = {}
        for name, tensor in tensors.items():
            old = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
            stored = mx.moveaxis(tensor, 1, -1) if "mlx" in style and tensor.ndim > 3 else tensor
            found[prefixes.get(old, "") + name.removeprefix(old)] = stored
        return found

    loaded = load(copied(family, tmp_path, renamed), dtype="float32")
    assert isinstance(loaded.vision, Vision), loaded.vision
    found, expected = features_of(loaded.vision, family, "one")
    assert distance(found, expected) < 1e-4
