"""InternVL in its original form (`internvl_chat`): other names, a template for texts, and settings of images in config.json."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.models.seeing import GOLDEN, cases
from support.vision.table import array, messages_with_pictures

from mlxinfer import LLM
from mlxinfer.errors import CheckpointError
from mlxinfer.vision.families import open_processor
from mlxinfer.vision.picture import read_picture

NAMES = {
    "vision_tower.": "vision_model.",
    "multi_modal_projector.layer_norm": "mlp1.0",
    "multi_modal_projector.linear_1": "mlp1.1",
    "multi_modal_projector.linear_2": "mlp1.3",
    "cls_token": "class_embedding",
    "position_embeddings": "position_embedding",
    "patch_embeddings.projection": "patch_embedding",
    "encoder.layer.": "encoder.layers.",
    "attention.projection_layer": "attn.proj",
    "attention.": "attn.",
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
    "lambda_": "ls",
}
SETTINGS = {"downsample_ratio": 0.5, "dynamic_image_size": True, "force_image_size": 56, "ps_version": "v2", "select_layer": -1}
SETTINGS |= {"max_dynamic_patch": 12, "min_dynamic_patch": 1, "use_thumbnail": True, "template": "internvl2_5", "pad2square": False}
PREPROCESSOR = {"crop_size": 56, "do_center_crop": True, "do_normalize": True, "do_resize": True, "resample": 3, "size": 56}
PREPROCESSOR |= {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225], "feature_extractor_type": "CLIPFeatureExtractor"}
TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"


@pytest.fixture
def original(tmp_path: Path) -> Path:
    """The golden checkpoint with the names and files of OpenGVLab's."""
    tensors = {}
    for name, tensor in mx.load(str(GOLDEN / "internvl" / "model.safetensors")).items():
        if not name.startswith("language_model."):
            for old, new in NAMES.items():
                name = name.replace(old, new)
        tensors[name] = tensor
    for name in [name for name in tensors if ".attn.q_proj." in name]:
        tensors[name.replace("q_proj", "qkv")] = mx.concatenate([tensors.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"])
    mx.save_safetensors(str(tmp_path / "model.safetensors"), tensors, {"format": "pt"})
    config = json.loads((GOLDEN / "internvl" / "config.json").read_text())
    vision = config["vision_config"] | {"model_type": "intern_vit_6b", "image_size": 56, "patch_size": 14}
    vision |= {"qkv_bias": vision.pop("attention_bias"), "qk_normalization": vision.pop("use_qk_norm")}
    whole = {
        "architectures": ["InternVLChatModel"],
        "model_type": "internvl_chat",
        "vision_config": vision,
        "llm_config": config["text_config"],
    }
    (tmp_path / "config.json").write_text(json.dumps(whole | SETTINGS))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(GOLDEN / "internvl" / name, tmp_path / name)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path


def test_prompts_and_answers_are_those_of_the_other_form(original: Path) -> None:
    with LLM(original, dtype="float32", memory_gb=1, max_context=512) as llm:
        for case, found in cases("internvl").items():
            messages = messages_with_pictures("internvl", case)
            assert llm.chat_prompt(messages).token_ids == array("internvl", f"{case}_input_ids").tolist(), case
            answer = llm.chat(messages, temperature=0, max_tokens=16, ignore_eos=True)
            assert answer.token_ids == found.greedy, case


def test_pixels_are_those_of_the_other_form(original: Path) -> None:
    own, other = open_processor(original), open_processor(GOLDEN / "internvl")
    for size in ((1, 1), (50, 311), (300, 300), (1000, 90)):
        picture = np.random.default_rng(size[0]).integers(0, 256, (*size, 3), dtype=np.uint8)
        assert np.array_equal(own.pixels(read_picture(picture)).normalized(), other.pixels(read_picture(picture)).normalized())


@pytest.mark.parametrize(
    ("key", "value", "pieces"), [("dynamic_image_size", False, 1), ("use_thumbnail", False, 6), ("max_dynamic_patch", 2, 3)]
)
def test_settings_of_the_config(original: Path, key: str, value: object, pieces: int) -> None:
    config = json.loads((original / "config.json").read_text())
    (original / "config.json").write_text(json.dumps(config | {key: value}))
    assert len(open_processor(original).plan((50, 311)).pieces) == pieces


def test_a_tokenizer_without_the_token_is_refused(original: Path) -> None:
    tokenizer = json.loads((original / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = [each for each in tokenizer["added_tokens"] if each["content"] != "<IMG_CONTEXT>"]
    (original / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match="no token <IMG_CONTEXT>"):
        open_processor(original)
