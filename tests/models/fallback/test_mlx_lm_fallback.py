"""mlx-lm's architectures behind the contract, fed configs of either style."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.models.plain_weights import PlainWeights
from support.models.tiny import logits_of, random_tokens
from support.oracles.plain_step import PlainCache

from mlxinfer.errors import UnsupportedModelError, WeightsError
from mlxinfer.models import build
from mlxinfer.models.fallback import mlx_lm as zoo

GOLDEN = Path(__file__).parents[2] / "golden" / "arch"
AGREES = ["granite", "llama", "llama3_rope", "llama_linear", "mixtral", "olmo2", "phi3", "phi3_longrope", "qwen2", "qwen3"]
AGREES += ["qwen3_5_text", "qwen3_next", "smollm3", "yarn"]

STABLELM: dict[str, Any] = {
    "model_type": "stablelm",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "use_qkv_bias": False,
    "partial_rotary_factor": 0.25,
    "layer_norm_eps": 1e-5,
}


def config(name: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((GOLDEN / name / "config.json").read_text(encoding="utf-8"))
    return read


def tensors(name: str) -> dict[str, mx.array]:
    return dict(mx.load(str(GOLDEN / name / "model.safetensors")))


def stablelm() -> dict[str, mx.array]:
    names = {f"self_attn.{part}_proj.weight": (64, 64) for part in "qkvo"}
    names |= {"mlp.gate_proj.weight": (96, 64), "mlp.up_proj.weight": (96, 64), "mlp.down_proj.weight": (64, 96)}
    names |= {f"{norm}_layernorm.{part}": (64,) for norm in ("input", "post_attention") for part in ("weight", "bias")}
    shapes = {f"model.layers.{layer}.{name}": shape for layer in range(2) for name, shape in names.items()}
    shapes |= {"model.embed_tokens.weight": (96, 64), "lm_head.weight": (96, 64), "model.norm.weight": (64,), "model.norm.bias": (64,)}
    return {name: mx.random.normal(shape, key=mx.random.key(seed)) * 0.1 for seed, (name, shape) in enumerate(shapes.items())}


def logits(model: zoo.FallbackModel, tokens: list[int], parts: list[int]) -> np.ndarray:
    cache, rows, start = PlainCache(model.layers), [], 0
    for count in parts:
        step = cache.step([(0, count)])
        rows.append(model.logits(model.hidden(mx.array(tokens[start : start + count], mx.int32), step)))
        start += count
    return np.array(mx.concatenate(rows))


@pytest.mark.parametrize("name", AGREES)
def test_a_config_of_the_new_style_gives_the_right_logits(name: str) -> None:
    data = np.load(GOLDEN / name / "reference.npz")
    model = zoo.build(config(name), tensors(name))
    tokens = data["ids"].tolist()
    assert np.abs(logits(model, tokens, [80]) - data["logits"]).max() < 2e-3
    assert np.abs(logits(model, tokens, [30, 1, 49]) - data["logits"]).max() < 2e-3


@pytest.mark.parametrize("name", [*AGREES, "qwen3_moe", "gpt_oss"])
def test_the_graphs_own_layout_is_one_that_mlx_lm_leaves_as_it_is(name: str) -> None:
    settings = config(name)
    if name == "gpt_oss":
        # mlx-lm rounds the range of its yarn, which gpt-oss does not.
        settings["rope_parameters"] = {"rope_type": "default", "rope_theta": 150000.0}
    weights, tokens = PlainWeights(tensors(name)), random_tokens(60)
    expected = logits_of(build(settings, weights), tokens)
    held = {key: matrix.weight for key, matrix in weights.asked.items()}
    np.testing.assert_allclose(logits(zoo.build(settings, held), tokens, [60]), expected, atol=2e-3)


def test_an_architecture_that_only_mlx_lm_has() -> None:
    assert zoo.supports(STABLELM)
    model = zoo.build(STABLELM, stablelm())
    assert (model.vocab_size, model.max_context) == (96, 128)
    assert "one sequence at a time" in model.notes[0]
    tokens = random_tokens(20)
    whole = logits(model, tokens, [20])
    np.testing.assert_allclose(logits(model, tokens, [7, 1, 12]), whole, atol=1e-4)


def test_each_sequence_has_a_state_of_its_own() -> None:
    model, tokens = zoo.build(STABLELM, stablelm()), random_tokens(12)
    cache = PlainCache(model.layers)
    model.hidden(mx.array(tokens[:5]), cache.step([(0, 5)]))
    model.hidden(mx.array(tokens[:2]), cache.step([(1, 2)]))
    both = mx.array(tokens[2:6] + tokens[5:8])
    rows = np.array(model.logits(model.hidden(both, cache.step([(1, 4), (0, 3)]))))
    whole = logits(model, tokens, [12])
    np.testing.assert_allclose(rows, np.concatenate([whole[2:6], whole[5:8]]), atol=1e-4)
    arrays = cache.state[0, 0].arrays()
    assert len(arrays) == 4
    assert all(isinstance(array, mx.array) for array in arrays)


@pytest.mark.parametrize(("bits", "mode"), [(4, "affine"), (8, "affine"), (4, "mxfp4")])
def test_packed_layers_run_packed(bits: int, mode: str) -> None:
    held, plain, packed = stablelm(), stablelm(), {}
    for name, tensor in held.items():
        if tensor.ndim == 2:
            path = name.removesuffix(".weight")
            parts = dict(zip(("weight", "scales", "biases"), mx.quantize(tensor, group_size=32, bits=bits, mode=mode), strict=False))
            packed |= {f"{path}.{part}": array for part, array in parts.items()}
            plain[name] = mx.dequantize(*parts.values(), group_size=32, bits=bits, mode=mode).astype(mx.float32)
        else:
            packed[name] = tensor
    stated = {"quantization": {"group_size": 32, "bits": bits, "mode": mode}}
    model, tokens = zoo.build(STABLELM | stated, packed), random_tokens(9)
    expected = logits(zoo.build(STABLELM, plain), tokens, [9])
    np.testing.assert_allclose(logits(model, tokens, [9]), expected, atol=1e-3)


def test_tensors_are_cast() -> None:
    model = zoo.build(STABLELM, stablelm(), mx.bfloat16)
    assert model.model.lm_head.weight.dtype == mx.bfloat16
    assert logits(model, [3, 4], [2]).dtype == np.float32


def test_missing_unexpected_and_misshaped_tensors_are_named() -> None:
    held = stablelm()
    del held["model.norm.bias"]
    held["lm_head.weight"] = mx.zeros((95, 64))
    with pytest.raises(WeightsError) as caught:
        zoo.build(STABLELM, held | {"model.extra": mx.zeros(3)})
    for part in ("model.norm.bias is missing", "model.extra is unexpected", "lm_head.weight has shape [95, 64], expected [96, 64]"):
        assert part in str(caught.value)


def test_tensors_that_mlx_lm_cannot_arrange_are_a_users_error() -> None:
    held = tensors("mixtral")
    del held["model.layers.1.block_sparse_moe.experts.2.w1.weight"]
    with pytest.raises(WeightsError, match=r"layers\.1\.block_sparse_moe\.experts\.2\.w1"):
        zoo.build(config("mixtral"), held)


def test_whether_the_head_is_tied_shows_in_the_tensors() -> None:
    tied = {name: tensor for name, tensor in tensors("llama").items() if name != "lm_head.weight"}
    for held in (tied, tensors("llama")):
        silent = {key: value for key, value in config("llama").items() if key != "tie_word_embeddings"}
        assert logits(zoo.build(silent, held), [5, 6], [2]).shape == (2, 96)


@pytest.mark.parametrize("model_type", ["nonesuch", "../utils", "cache.KVCache", "utils", "switch_layers", "__init__", ""])
def test_only_architectures_of_mlx_lm_are_imported(model_type: str) -> None:
    with pytest.raises(UnsupportedModelError):
        zoo.build({"model_type": model_type, "vocab_size": 1}, {})


@pytest.mark.parametrize("key", ["auto_map", "model_file", "trust_remote_code"])
def test_code_of_the_models_own_is_named_and_never_run(tmp_path: Path, key: str) -> None:
    trap = tmp_path / "model.py"
    trap.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    model = zoo.build(STABLELM | {key: str(trap)}, stablelm())
    assert [note for note in model.notes if key in note and "never run" in note]
    with pytest.raises(UnsupportedModelError, match=f"nonesuch.*{key}.*never run"):
        zoo.build({"model_type": "nonesuch", key: str(trap)}, {})
    assert not (tmp_path / "ran").exists()


def test_a_config_that_mlx_lm_cannot_read_is_a_users_error() -> None:
    with pytest.raises(UnsupportedModelError, match="stablelm"):
        zoo.build({"model_type": "stablelm"}, {})


def test_foreign_quantization_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="gptq"):
        zoo.build(STABLELM | {"quantization_config": {"quant_method": "gptq", "bits": 4}}, stablelm())


def test_what_the_old_style_cannot_say_is_refused() -> None:
    uneven = ["full_attention", "sliding_attention", "sliding_attention"]
    with pytest.raises(UnsupportedModelError, match="layer_types"):
        zoo.build(config("gemma3_text") | {"layer_types": uneven}, tensors("gemma3_text"))


@pytest.mark.parametrize(
    "changes", [{"rope_scaling": {"type": "linear", "factor": 2.0}}, {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}]
)
def test_rope_keys_that_mlx_lm_would_drop_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match="does not read rope_scaling"):
        zoo.build(STABLELM | changes, stablelm())
