"""Towers in mmproj files: written by llama.cpp's rules, they give the features and pixels of the hub's checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.formats.mmproj import TYPES, write_mmproj
from support.formats.vlm_gguf import write_qwen3_vl
from support.models.towers import GOLDEN, config_of, largest_error, tensors_of

from mlxinfer import LLM, SamplingParams
from mlxinfer.errors import CheckpointError, SettingError, UnsupportedModelError
from mlxinfer.loading.find.resolve import find_mmproj
from mlxinfer.loading.gguf.mmproj.checkpoint import MMProjCheckpoint
from mlxinfer.loading.gguf.mmproj.projectors import PROJECTORS
from mlxinfer.loading.weights import CheckpointWeights
from mlxinfer.models.towers import Tower, tower_of
from mlxinfer.vision.families import open_processor
from mlxinfer.vision.picture import read_picture

FAMILIES = {
    "smolvlm": "<image>",
    "idefics3": "<image>",
    "gemma3": "<image_soft_token>",
    "mistral3": "[IMG]",
    "qwen2_vl": "<|image_pad|>",
    "qwen2_5_vl": "<|image_pad|>",
    "qwen3_vl": "<|image_pad|>",
    "qwen3_5": "<|image_pad|>",
    "internvl": "<IMG_CONTEXT>",
    "internvl_6b": "<IMG_CONTEXT>",
    "lfm2_vl": "<image>",
    "gemma4": "<|image|>",
    "gemma4_e": "<|image|>",
}
"""Directories of golden towers to the token of image rows."""
TEXT_TYPES = {"qwen3_5": "qwen3_5_text", "qwen3_vl": "qwen3"}


def text_of(config: dict[str, Any]) -> dict[str, Any]:
    text = dict(config.get("text_config") or {"hidden_size": config["hidden_size"]})
    return text | {"model_type": TEXT_TYPES.get(config["model_type"], text.get("model_type", "llama"))}


def written(path: Path, family: str, **options: Any) -> MMProjCheckpoint:
    config = config_of(family)
    tensors = {name: np.array(values) for name, values in tensors_of(family).items()}
    write_mmproj(path / "mmproj.gguf", config, tensors, **options)
    return MMProjCheckpoint(path / "mmproj.gguf", text_of(config), ["<s>", FAMILIES[family]])


def tower_in(checkpoint: MMProjCheckpoint) -> Tower:
    weights = CheckpointWeights(checkpoint, mx.float32)
    tower = tower_of(checkpoint.config, weights)
    weights.finish()
    return tower


@pytest.mark.parametrize("family", FAMILIES)
def test_features_are_those_of_the_hub(family: str, tmp_path: Path) -> None:
    checkpoint = written(tmp_path, family)
    assert checkpoint.config["image_token_id"] == 1
    assert largest_error(tower_in(checkpoint), family) < 2e-5


@pytest.mark.parametrize("family", ["qwen3_vl", "mistral3"])
def test_half_precision_is_near(family: str, tmp_path: Path) -> None:
    assert 1e-6 < largest_error(tower_in(written(tmp_path, family, half=True)), family) < 1e-2


def test_every_projector_type_is_tried() -> None:
    assert {TYPES[config_of(family)["model_type"]] for family in FAMILIES} == set(PROJECTORS)


@pytest.mark.parametrize("family", ["gemma3", "mistral3", "qwen3_vl", "smolvlm"])
def test_pixels_and_prompts_are_those_of_the_hub(family: str, tmp_path: Path) -> None:
    """Files say less than a directory; the golden checkpoints differ from the families' usual settings in what is given here."""
    directory = GOLDEN.parent / family
    settings = json.loads((directory / "preprocessor_config.json").read_text())
    size = settings.get("size", {})
    keys = {
        "gemma3": {"image_size": size.get("height")},
        "mistral3": {"image_size": size.get("longest_edge")},
        "qwen3_vl": {"image_min_pixels": size.get("shortest_edge"), "image_max_pixels": size.get("longest_edge")},
        "smolvlm": {"preproc_image_size": size.get("longest_edge")},
    }
    found, wanted = written(tmp_path, family, **keys[family]).processor, open_processor(directory)
    with np.load(directory / "reference.npz") as reference:
        for number in range(2):
            image = read_picture(reference[f"two_image_{number}"])
            own, theirs = found.pixels(image), wanted.pixels(image)
            assert own.layout == theirs.layout
            assert np.array_equal(own.normalized(), theirs.normalized())
            assert found.expansion(own.layout) == wanted.expansion(theirs.layout)


def test_files_of_2024_have_the_matrices_of_the_mlp_exchanged(tmp_path: Path) -> None:
    config = config_of("qwen2_vl")
    tensors = {name: np.array(values) for name, values in tensors_of("qwen2_vl").items()}
    swapped = {name.replace("fc1", "fcX").replace("fc2", "fc1").replace("fcX", "fc2"): values for name, values in tensors.items()}
    write_mmproj(tmp_path / "mmproj.gguf", config, swapped)
    checkpoint = MMProjCheckpoint(tmp_path / "mmproj.gguf", text_of(config), ["<|image_pad|>"])
    assert largest_error(tower_in(checkpoint), "qwen2_vl") < 2e-5


def test_a_tower_for_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="belongs to a text model of 999 channels"):
        written(tmp_path, "smolvlm", projection_dim=999)


def test_a_vocabulary_without_the_token_is_refused(tmp_path: Path) -> None:
    written(tmp_path, "smolvlm").close()
    with pytest.raises(UnsupportedModelError, match="needs the token <image>"):
        MMProjCheckpoint(tmp_path / "mmproj.gguf", text_of(config_of("smolvlm")), ["<s>"])


def test_other_projectors_are_refused_by_name(tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "mmproj.gguf", "clip")
    writer.add_string("clip.projector_type", "gemma3nv")
    writer.add_tensor("v.patch_embd.weight", np.zeros((1, 1), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match="projector type 'gemma3nv'"):
        MMProjCheckpoint(tmp_path / "mmproj.gguf", {"hidden_size": 1}, [])


def test_the_file_beside_the_model_is_found(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.touch()
    assert find_mmproj(model) is None
    first = tmp_path / "mmproj-model-f16.gguf"
    first.touch()
    assert find_mmproj(model) == first
    (tmp_path / "model-mmproj-q8_0.gguf").touch()
    with pytest.raises(CheckpointError, match="--mmproj FILE"):
        find_mmproj(model)


def greedy(model: Path, messages: list[dict[str, Any]]) -> list[int]:
    with LLM(model, dtype="float32", max_context=1024) as llm:
        assert llm.sees_images
        return llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)).token_ids


@pytest.mark.parametrize("case", ["one", "two", "turns"])
def test_a_text_model_answers_with_the_tower_beside_it(case: str, tmp_path: Path) -> None:
    """The answers are those of the hub's checkpoint, and of transformers."""
    golden = GOLDEN.parent / "qwen3_vl"
    model = write_qwen3_vl(tmp_path, golden)
    with np.load(golden / "reference.npz") as reference:
        messages, expected = json.loads(str(reference[f"{case}_messages"])), reference[f"{case}_greedy"].tolist()
        images = iter(range(9))
        for part in (part for message in messages for part in message["content"] if isinstance(part, dict)):
            if part["type"] == "image":
                part["image"] = reference[f"{case}_image_{next(images)}"]
    assert greedy(model, messages) == expected


def test_a_tower_that_does_not_fit_is_a_note_or_an_error(tmp_path: Path) -> None:
    model = write_qwen3_vl(tmp_path, GOLDEN.parent / "qwen3_vl")
    config = config_of("smolvlm")
    write_mmproj(tmp_path / "mmproj.gguf", config, {name: np.array(values) for name, values in tensors_of("smolvlm").items()})
    with LLM(model, dtype="float32", max_context=256) as llm:
        assert not llm.sees_images
        assert any("needs the token <image>" in note or "channels" in note for note in llm.notes)
    with pytest.raises((UnsupportedModelError, CheckpointError)):
        LLM(model, mmproj=tmp_path / "mmproj.gguf")
    with LLM(model, vision="off", max_context=256) as llm:
        assert not llm.sees_images
    (tmp_path / "mmproj.gguf").unlink()
    with LLM(model, max_context=256) as llm:
        assert any("put its mmproj file beside the model" in note for note in llm.notes)


def test_a_directory_of_a_model_and_its_tower_is_a_model(tmp_path: Path) -> None:
    write_qwen3_vl(tmp_path, GOLDEN.parent / "qwen3_vl")
    with LLM(tmp_path, max_context=256) as llm:
        assert llm.sees_images


def test_mmproj_as_a_model_is_refused_by_name(tmp_path: Path) -> None:
    write_mmproj(tmp_path / "mmproj.gguf", config_of("smolvlm"), {name: np.array(values) for name, values in tensors_of("smolvlm").items()})
    with pytest.raises(UnsupportedModelError, match=r"holds a vision tower only .* give the file of the language model"):
        LLM(tmp_path / "mmproj.gguf")


def test_mmproj_of_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="belongs to a GGUF model"):
        LLM(GOLDEN.parent / "smolvlm", mmproj=tmp_path / "mmproj.gguf")
