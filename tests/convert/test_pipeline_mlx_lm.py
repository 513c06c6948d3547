"""mlx-lm loads the results of `convert` and computes the same logits."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.models.checkpoints import GOLDEN, config_of, random_checkpoint
from support.oracles.plain_step import PlainCache
from support.processes.optional import Later

from mlxinfer.convert import convert
from mlxinfer.loading.load import load

mlx_lm, mlx_lm_cache = Later("mlx_lm.utils"), Later("mlx_lm.models.cache")
pytestmark = pytest.mark.long

IDS = np.random.default_rng(3).integers(3, 96, 40)

ARCHITECTURES = ["llama", "llama3_rope", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gemma3_text", "phi3", "phi3_longrope", "granite",
                 "olmo2", "smollm3", "yarn", "qwen3_next", "qwen3_5_text", "gpt_oss"]  # fmt: skip

# mlx-lm rounds YaRN's boundaries whatever the config says; the factors of longrope are for heads of 8.
CHANGES: dict[str, dict[str, Any]] = {
    "phi3_longrope": {"num_attention_heads": 8},
    "gpt_oss": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 4096}},
}


@pytest.fixture(autouse=True)
def _activations_are_not_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides compute in float32, so that a difference is a mistake."""
    monkeypatch.setenv("MLXINFER_CPU_PRECISION", "float32")


def ours(directory: Path) -> np.ndarray:
    model = load(directory, dtype="float32").model
    step = PlainCache(model.layers).step([(0, len(IDS))])
    return np.array(model.logits(model.hidden(mx.array(IDS.astype(np.int32)), step)))


def theirs(directory: Path) -> np.ndarray:
    model, _ = mlx_lm.load_model(directory)
    return np.array(model(mx.array(IDS[None].astype(np.int32)), cache=mlx_lm_cache.make_prompt_cache(model))[0].astype(mx.float32))


# Before 0.32, the newest for Python 3.10, mlx-lm computes gated delta nets less exactly; its other architectures agree to 1e-4 there too.
LIMIT = 1e-3 if version("mlx-lm") >= "0.32" else 2e-2


def agree(directory: Path) -> bool:
    return float(np.abs(ours(directory) - theirs(directory)).max()) < LIMIT


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_plain_and_quantized(tmp_path: Path, name: str) -> None:
    source = random_checkpoint(tmp_path / "source", config_of(name, **CHANGES.get(name, {})))
    convert(source, tmp_path / "plain")
    assert agree(tmp_path / "plain")
    report = convert(source, tmp_path / "four", bits=4, group_size=32, encoder="minmax")
    assert report.actions["quantized"] >= 10
    assert agree(tmp_path / "four")
    assert np.abs(ours(tmp_path / "four") - ours(tmp_path / "plain")).max() > 1e-3


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "qwen3_next", "qwen3_5_text", "gpt_oss"])
def test_the_layout_of_hugging_face(tmp_path: Path, name: str) -> None:
    """transformers wrote the golden checkpoints: experts one by one, convolutions transposed, norms around zero."""
    convert(GOLDEN / name, tmp_path / "out")
    assert np.abs(ours(GOLDEN / name) - ours(tmp_path / "out")).max() < 1e-5
    if name != "gpt_oss":
        assert agree(tmp_path / "out")


FORMS: list[dict[str, Any]] = [
    *({"bits": bits, "group_size": 64} for bits in (2, 3, 5, 6, 8)),
    {"bits": 4, "group_size": 128},
    {"mode": "mxfp4"},
    {"mode": "mxfp8"},
    {"mode": "nvfp4"},
    {"dtype": "float32"},
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_format(tmp_path: Path, form: dict[str, Any]) -> None:
    source = random_checkpoint(tmp_path / "source", config_of("llama", num_hidden_layers=1))
    convert(source, tmp_path / "out", **form)
    assert agree(tmp_path / "out")


def test_layers_with_smaller_groups_and_without(tmp_path: Path) -> None:
    """128 columns get groups of 128, 96 columns groups of 32, and 80 columns stay plain."""
    config = config_of("llama", hidden_size=96, intermediate_size=80, num_attention_heads=8, head_dim=16)
    source = random_checkpoint(tmp_path / "source", config)
    report = convert(source, tmp_path / "out", bits=4, group_size=128)
    stored = {tensor.name: tensor.stored for tensor in report.tensors}
    assert stored["model.layers.0.self_attn.o_proj.weight"] == "4-bit affine in groups of 128"
    assert stored["model.layers.0.self_attn.q_proj.weight"] == "4-bit affine in groups of 32"
    assert stored["model.layers.0.mlp.down_proj.weight"] == "float32"
    assert agree(tmp_path / "out")


@pytest.mark.parametrize(("name", "same"), [("mistral", 24), ("gemma2", 24), ("gpt_oss", 1)])
def test_where_mlx_lm_is_known_to_differ_the_report_says_so(tmp_path: Path, name: str, same: int) -> None:
    source = random_checkpoint(tmp_path / "source", config_of(name))
    report = convert(source, tmp_path / "out")
    assert any("mlx-lm" in note for note in report.notes)
    difference = np.abs(ours(tmp_path / "out") - theirs(tmp_path / "out")).max(axis=-1)
    assert difference[:same].max() < 1e-3
    assert difference[same:].max() > 1e-3
    assert not any("mlx-lm" in note for note in convert(GOLDEN / "llama", tmp_path / "llama").notes)


def written_by_mlx_lm(source: Path, target: Path, predicate: Any = None, **form: Any) -> Path:
    model, config = mlx_lm.load_model(source)
    model, config = mlx_lm.quantize_model(model, config, form.get("group_size", 64), form.get("bits", 4), quant_predicate=predicate)
    mlx_lm.save_model(target, model)
    mlx_lm.save_config(config, target / "config.json")
    return target


def per_layer(path: str, module: Any) -> bool | dict[str, Any]:
    if path.endswith("o_proj"):
        return {"bits": 8, "group_size": 32}
    return "up_proj" not in path


@pytest.mark.parametrize(("name", "predicate"), [("llama", None), ("llama", per_layer), ("qwen3_moe", None), ("qwen3_next", None)])
def test_directories_written_by_mlx_lm(tmp_path: Path, name: str, predicate: Any) -> None:
    """Formats differ per layer, by mlx-lm's own choice for routers of experts or by a predicate."""
    config = config_of(name, num_attention_heads=8, head_dim=16)
    source = random_checkpoint(tmp_path / "source", config)
    convert(source, tmp_path / "plain")
    theirs_quantized = written_by_mlx_lm(tmp_path / "plain", tmp_path / "theirs", predicate)
    assert agree(theirs_quantized)
    report = convert(theirs_quantized, tmp_path / "again")
    assert report.actions.keys() == {"kept"}
    assert np.array_equal(ours(theirs_quantized), ours(tmp_path / "again"))
    assert agree(tmp_path / "again")


def test_the_same_bytes_as_mlx_lm(tmp_path: Path) -> None:
    source = random_checkpoint(tmp_path / "source", config_of("llama", num_attention_heads=8), dtype=mx.bfloat16)
    convert(source, tmp_path / "plain")
    convert(source, tmp_path / "ours", bits=4, encoder="minmax")
    written_by_mlx_lm(tmp_path / "plain", tmp_path / "theirs")
    first, second = (mx.load(str(tmp_path / name / "model.safetensors")) for name in ("ours", "theirs"))
    assert first.keys() == second.keys()
    assert all(mx.array_equal(first[name], second[name]).item() for name in first)


def with_images(directory: Path, text: str, outer: str, prefix: str) -> Path:
    """Write the checkpoint of a multimodal model: the text model under longer names, and a vision tower."""
    config = config_of(text)
    random_checkpoint(directory, config)
    tensors = {prefix + name.removeprefix("model."): array for name, array in mx.load(str(directory / "model.safetensors")).items()}
    if "lm_head.weight" not in tensors and prefix + "lm_head.weight" in tensors:
        tensors["lm_head.weight"] = tensors.pop(prefix + "lm_head.weight")
    mx.eval(list(tensors.values()))
    mx.save_safetensors(str(directory / "model.safetensors"), {**tensors, "model.visual.patch_embed.weight": mx.ones((4, 4))})
    whole = {"model_type": outer, "text_config": config, "vision_config": {"depth": 1}, "architectures": ["X"]}
    (directory / "config.json").write_text(json.dumps(whole))
    return directory


@pytest.mark.parametrize(("text", "outer"), [("gemma3_text", "gemma3"), ("qwen3_5_text", "qwen3_5")])
def test_the_text_model_inside_a_larger_one(tmp_path: Path, text: str, outer: str) -> None:
    source = with_images(tmp_path / "source", text, outer, "model.language_model.")
    report = convert(source, tmp_path / "out", bits=4, group_size=32)
    assert report.skipped == {"model.visual.patch_embed.weight": "kept in towers.safetensors"}
    assert mx.array_equal(mx.load(str(tmp_path / "out" / "towers.safetensors"))["model.visual.patch_embed.weight"], mx.ones((4, 4))).item()
    assert all(tensor.name.startswith(("model.layers", "model.norm", "model.embed", "lm_head")) for tensor in report.tensors)
    assert agree(tmp_path / "out")
    convert(source, tmp_path / "plain")
    assert np.array_equal(ours(source), ours(tmp_path / "plain"))


def test_mxfp4_of_gpt_oss_is_kept(tmp_path: Path) -> None:
    """Hugging Face's blocks and scales, with gate and up in alternating rows, become mlx-lm's bit for bit."""
    plain = random_checkpoint(tmp_path / "plain", config_of("gpt_oss", **CHANGES["gpt_oss"]))
    tensors = dict(mx.load(str(plain / "model.safetensors")))
    stored = {name: array for name, array in tensors.items() if "experts" not in name}
    for layer in range(3):
        name = f"model.layers.{layer}.mlp.experts"
        for part, rows in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            joined = mx.stack([tensors[f"{name}.{row}.weight"] for row in rows], axis=2).flatten(1, 2)
            codes, scales = mx.quantize(joined, mode="mxfp4")
            stored[f"{name}.{part}_blocks"] = codes.view(mx.uint8).reshape(*scales.shape, 16)
            stored[f"{name}.{part}_scales"] = scales
            stored[f"{name}.{part}_bias"] = mx.stack([tensors[f"{name}.{row}.bias"] for row in rows], axis=-1).flatten(1, 2)
    source = tmp_path / "source"
    source.mkdir()
    mx.save_safetensors(str(source / "model.safetensors"), stored)
    config = json.loads((plain / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (source / "config.json").write_text(json.dumps(config))
    report = convert(source, tmp_path / "out")
    assert max(tensor.error for tensor in report.tensors) == 0
    written = json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]
    assert (written["mode"], written["bits"], written["group_size"]) == ("mxfp4", 4, 32)
    assert np.array_equal(ours(source), ours(tmp_path / "out"))
    assert agree(tmp_path / "out")
