"""Files in the form of Ollama's converters: golden files with Ollama's keys and tensors give the logits of the checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from mlxinfer.errors import UnsupportedModelError
from mlxinfer.loading.gguf import GGUFCheckpoint
from mlxinfer.models.vlm_text import is_more_than_text
from mlxinfer.nn.weights import numbers
from mlxinfer.tokenizer.tokenizer import from_gguf
from tests.support.formats.gguf_file import Tensor
from tests.support.formats.gguf_golden import Arrays, golden, logits, reference, write_model
from tests.support.formats.ollama_forms import FORMS, Hyper, gpt_oss, gpt_oss_fused, gpt_oss_of_the_newer_converter


@pytest.mark.parametrize(("name", "form"), FORMS.values(), ids=FORMS.keys())
def test_the_logits_of_the_checkpoint(name: str, form: Callable[[Hyper, Arrays], str], tmp_path: Path) -> None:
    _, hyper, arrays = golden(name)
    architecture = form(hyper, arrays)
    path = write_model(tmp_path / "x.gguf", architecture, hyper, arrays)
    ids, expected = reference(name)
    np.testing.assert_allclose(logits(path, ids), expected, atol=2e-4)
    checkpoint = GGUFCheckpoint(path)
    eyes = any(tensor.startswith("v.") for tensor in arrays) or architecture == "qwen2vl"
    assert is_more_than_text(checkpoint.config) == eyes
    checkpoint.close()


def test_the_table_of_the_documentation(tmp_path: Path) -> None:
    """The architecture of each row has a form above, or is refused."""
    text = (Path(__file__).parents[3] / "docs" / "gguf.md").read_text()
    rows = dict(re.findall(r"^\| `([\w-]+)` \| (read|refused)\b", text, re.MULTILINE))
    made = {form(*golden(name)[1:]) for name, form in FORMS.values()}
    assert {name for name, fate in rows.items() if fate == "read"} == made
    for name in (name for name, fate in rows.items() if fate == "refused"):
        with pytest.raises(UnsupportedModelError, match=rf"{name}\b.*; give the model's safetensors instead"):
            refused(tmp_path / "x.gguf", "llama", name, {})


def test_halves_of_fused_experts_in_llama_cpps_files_are_not_taken_in_turn(tmp_path: Path) -> None:
    """Both converters write `ffn_gate_up_exps`, in another order."""
    _, hyper, arrays = golden("gpt-oss")
    for layer in range(2):
        gate, up = (arrays.pop(f"blk.{layer}.ffn_{part}_exps.weight") for part in ("gate", "up"))
        arrays[f"blk.{layer}.ffn_gate_up_exps.weight"] = np.concatenate([gate, up], axis=1)
    ids, expected = reference("gpt-oss")
    found = logits(write_model(tmp_path / "x.gguf", "gpt-oss", hyper, arrays), ids)
    np.testing.assert_allclose(found, expected, atol=2e-4)


def test_a_tensor_under_both_names_is_not_lost(tmp_path: Path) -> None:
    _, hyper, arrays = golden("gpt-oss")
    arrays["blk.0.attn_out.weight"] = arrays["blk.0.attn_output.weight"] + 1
    checkpoint = GGUFCheckpoint(write_model(tmp_path / "x.gguf", gpt_oss_of_the_newer_converter(hyper, arrays), hyper, arrays))
    assert "blk.0.attn_out.weight" in checkpoint.names()
    checkpoint.close()


def test_divisors_of_a_rope_that_is_not_divided_are_empty(tmp_path: Path) -> None:
    _, hyper, arrays = golden("llama_linear")
    empty = [Tensor(f"rope_factors_{kind}.weight", (0,), b"") for kind in ("long", "short")]
    ids, expected = reference("llama_linear")
    found = logits(write_model(tmp_path / "x.gguf", "llama", hyper, arrays, tensors=empty), ids)
    np.testing.assert_allclose(found, expected, atol=2e-4)


def refused(path: Path, name: str, architecture: str, changes: Hyper, further: Arrays | None = None) -> GGUFCheckpoint:
    _, hyper, arrays = golden(name)
    return GGUFCheckpoint(write_model(path, architecture, hyper | changes, arrays | (further or {})))


@pytest.mark.parametrize("name", ["glmocr", "deepseekocr", "llama4", "mllama", "gemma3n", "laguna"])
def test_models_that_cannot_be_read_are_refused_as_made_by_ollama(name: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=f"made by Ollama from a model of the architecture {name}, .*; give the model's safet"):
        refused(tmp_path / "x.gguf", "llama", name, {})


@pytest.mark.parametrize(
    ("name", "architecture", "changes", "message"),
    [
        ("qwen35", "qwen35", {"ssm.v_head_reordered": False}, "made by Ollama, with qwen35.ssm.v_head_reordered = False"),
        ("qwen3next", "qwen3next", {"ssm.v_head_reordered": True}, "made by Ollama, with qwen3next.ssm.v_head_reordered = True"),
        ("mistral3", "mistral3", {"rope.scaling.mscale": 0.5}, "made by Ollama, with mistral3.rope.scaling.mscale = 0.5"),
        ("gemma3", "gemma3", {"rope.local.freq_base": 5.0}, "made by Ollama, with gemma3.rope.local.freq_base = 5.0 beside another rope"),
        ("gpt-oss", "gptoss", {"attention.secret": 1}, "gptoss.attention.secret = 1 is not understood"),
        ("gemma4", "gemma4", {"attention.global_head_count_kv": 1}, "global_head_count_kv = 1 gives full layers other KV heads"),
        ("glm4", "glm4", {"rope.dimension_sections": [2, 1, 1, 0]}, "glm4.rope.dimension_sections = .* is not understood"),
    ],
)
def test_keys_that_change_the_maths_are_refused_by_name(name: str, architecture: str, changes: Hyper, message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        refused(tmp_path / "x.gguf", name, architecture, changes)


def test_embedding_gemma_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="made by Ollama from EmbeddingGemma"):
        refused(tmp_path / "x.gguf", "gemma3", "gemma3", {}, {"dense.0.weight": np.ones((4, 4))})


def config(path: Path, name: str, changes: Hyper, architecture: str = "", further: Arrays | None = None) -> dict[str, Any]:
    own, hyper, arrays = golden(name)
    checkpoint = GGUFCheckpoint(write_model(path, architecture or own, hyper | changes, arrays | (further or {})))
    checkpoint.close()
    return checkpoint.config


@pytest.mark.parametrize("layers", [34, 48, 62])
def test_the_published_gemmas_stretch_the_rope_of_full_layers(layers: int, tmp_path: Path) -> None:
    """Ollama's files leave this out; llama.cpp's state it."""
    changes: Hyper = {"block_count": layers, "mm.tokens_per_image": 256}
    found = config(tmp_path / "x.gguf", "gemma3", changes)
    assert (found["rope_scaling"]["rope_type"], found["rope_scaling"]["factor"]) == ("linear", 8.0)
    assert config(tmp_path / "y.gguf", "gemma3", {"block_count": layers})["rope_scaling"] is None
    stated = changes | {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    assert config(tmp_path / "z.gguf", "gemma3", stated)["rope_scaling"]["factor"] == 4.0


def test_the_published_gemma_of_1b_has_no_cap(tmp_path: Path) -> None:
    layers: Hyper = {"block_count": 26, "final_logit_softcapping": 30.0}
    marked = layers | {"rope.freq_base_swa": None, "rope.local.freq_base": 10000.0}
    assert config(tmp_path / "x.gguf", "gemma3", marked)["final_logit_softcapping"] is None
    assert config(tmp_path / "y.gguf", "gemma3", layers)["final_logit_softcapping"] == 30.0


def test_the_published_gemmas_can_chat(tmp_path: Path) -> None:
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(92))]
    others = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": [0.0] * 96}
    others |= {"tokenizer.ggml.token_type": [3, 3, 3, 2] + [6] * 92, "tokenizer.ggml.bos_token_id": 2}
    _, hyper, arrays = golden("gemma3")
    checkpoint = GGUFCheckpoint(write_model(tmp_path / "x.gguf", "gemma3", hyper | {"mm.tokens_per_image": 256}, arrays, others))
    said = [("system", "Be brief."), ("user", " Hello "), ("assistant", "Hi."), ("user", "Bye")]
    messages = [{"role": role, "content": text} for role, text in said]
    text = from_gguf(checkpoint.metadata).render_chat(messages, add_generation_prompt=True)
    checkpoint.close()
    first = "<bos><start_of_turn>user\nBe brief.\n\nHello<end_of_turn>\n<start_of_turn>model\nHi.<end_of_turn>\n"
    assert text == first + "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n"


def test_gemmas_yarn_takes_ollamas_defaults(tmp_path: Path) -> None:
    yarn: Hyper = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}
    found = config(tmp_path / "x.gguf", "gemma3", yarn | {"rope.scaling.extrapolation_factor": 1.0})["rope_scaling"]
    assert (found["beta_fast"], found["beta_slow"], found["attention_factor"]) == (64.0, 1.0, 1.0)
    found = config(tmp_path / "y.gguf", "gemma3", yarn | {"rope.scaling.beta_fast": 16.0})["rope_scaling"]
    assert (found["beta_fast"], found["attention_factor"]) == (16.0, 1.0)
    assert config(tmp_path / "z.gguf", "gemma3", yarn)["rope_scaling"]["beta_fast"] == 32.0


def test_a_rope_that_is_not_stretched_has_empty_keys(tmp_path: Path) -> None:
    empty: Hyper = {
        "rope.scaling.type": "",
        "rope.scaling.factor": 0.0,
        "rope.scaling.original_context_length": 0,
        "rope.scaling.yarn_beta_fast": 0.0,
        "rope.scaling.yarn_beta_slow": 0.0,
        "rope.scaling.yarn_log_multiplier": 0.0,
        "attention.temperature_scale": None,
    }
    assert config(tmp_path / "x.gguf", "mistral3", empty)["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    assert config(tmp_path / "y.gguf", "deepseek3", empty)["rope_scaling"] is None


def test_experts_whose_weights_are_not_normalized(tmp_path: Path) -> None:
    assert config(tmp_path / "x.gguf", "qwen3moe", {"norm_top_k_prob": False})["norm_topk_prob"] is False


def test_experts_of_lfm2_are_scaled(tmp_path: Path) -> None:
    assert config(tmp_path / "x.gguf", "lfm2moe", {"expert_weights_scale": 2.5})["routed_scaling_factor"] == 2.5


def test_experts_behind_a_narrower_stream(tmp_path: Path) -> None:
    _, hyper, arrays = golden("nemotron_h_moe")
    arrays |= {"blk.1.ffn_latent_in.weight": np.ones((8, 32)), "blk.1.ffn_latent_out.weight": np.ones((32, 8))}
    checkpoint = GGUFCheckpoint(write_model(tmp_path / "x.gguf", "nemotron_h_moe", hyper, arrays))
    assert checkpoint.config["moe_latent_size"] == 8
    assert {"backbone.layers.1.mixer.fc1_latent_proj.weight", "backbone.layers.1.mixer.fc2_latent_proj.weight"} <= set(checkpoint.names())
    checkpoint.close()


def test_rows_in_turn_are_taken_apart_in_blocks_as_well(tmp_path: Path) -> None:
    """Blocks that the CPU kernels read in the file have the same numbers as the decoded tensor."""
    _, hyper, arrays = golden("gpt-oss")
    architecture = gpt_oss_fused(hyper, arrays)
    blocks = []
    for name in [name for name in arrays if name.endswith("gate_up_exps.weight")]:
        values = arrays.pop(name)
        packed = gguf.quants.quantize(values.astype(np.float32), gguf.GGMLQuantizationType.Q8_0)
        blocks.append(Tensor(name, values.shape, packed.tobytes(), type=8))
    path = write_model(tmp_path / "x.gguf", architecture, hyper, arrays, tensors=blocks)
    raw, plain = GGUFCheckpoint(path, raw_blocks=True), GGUFCheckpoint(path)
    for name in ("model.layers.0.mlp.experts.gate_proj.weight", "model.layers.1.mlp.experts.up_proj.weight"):
        np.testing.assert_array_equal(np.array(numbers(raw.read(name))), np.array(numbers(plain.read(name))))
    raw.close()
    plain.close()


LEVELS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 99, -0.5, -1, -1.5, -2, -3, -4, -6]) / 8
"""Values of MXFP4's codes, times an eighth; the second zero is not used."""


def mxfp4(values: np.ndarray, *, neighbours: bool) -> tuple[bytes, np.ndarray]:
    """The nearest numbers with a scale of an eighth, as MXFP4 blocks and plain. `neighbours` puts neighbouring codes in each byte."""
    codes = np.abs(values.reshape(-1, 32, 1) - LEVELS).argmin(axis=-1).astype(np.uint8)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4 if neighbours else codes[:, :16] | codes[:, 16:] << 4
    scales = np.full((len(codes), 1), 124, np.uint8)
    return np.concatenate([scales, packed], axis=1).tobytes(), LEVELS[codes].reshape(values.shape)


def test_the_codes_of_ollamas_first_mxfp4_lie_side_by_side(tmp_path: Path) -> None:
    """The same model with plain numbers, with llama.cpp's blocks, and with Ollama's fused ones has the same logits."""
    _, hyper, arrays = golden("gpt-oss")
    ids, _ = reference("gpt-oss")
    plain, theirs, names = dict(arrays), [], [f"blk.{layer}.ffn_{part}_exps.weight" for layer in range(2) for part in ("gate", "up")]
    for name in names:
        data, plain[name] = mxfp4(10 * arrays[name], neighbours=False)
        theirs.append(Tensor(name, arrays.pop(name).shape, data, type=39))
    expected = logits(write_model(tmp_path / "plain.gguf", "gpt-oss", hyper, plain), ids)
    got = logits(write_model(tmp_path / "theirs.gguf", "gpt-oss", hyper, arrays, tensors=theirs), ids)
    np.testing.assert_allclose(got, expected, atol=1e-4)
    fused = []
    for layer in range(2):
        gate, up = (plain[f"blk.{layer}.ffn_{part}_exps.weight"] for part in ("gate", "up"))
        both = np.stack([gate, up], axis=2).reshape(gate.shape[0], -1, gate.shape[2])
        fused.append(Tensor(f"blk.{layer}.ffn_gate_up_exps.weight", both.shape, mxfp4(both, neighbours=True)[0], type=4))
        biases = [arrays.pop(f"blk.{layer}.ffn_{part}_exps.bias") for part in ("gate", "up")]
        arrays[f"blk.{layer}.ffn_gate_up_exps.bias"] = np.stack(biases, axis=2).reshape(gate.shape[0], -1)
    architecture = gpt_oss(hyper, arrays)
    got = logits(write_model(tmp_path / "ollama.gguf", architecture, hyper, arrays, tensors=fused), ids)
    np.testing.assert_allclose(got, expected, atol=1e-4)


TOKENS = ["a", "b", "c", "<|eot_id|>"]
TOKENIZERS: dict[str, tuple[str, str, Hyper, Hyper]] = {
    "gpt-oss": ("gpt-oss", "gptoss", {"model": "gpt2", "pre": "default"}, {"pre": "gpt-4o"}),
    "no name": ("mistral3", "mistral3", {"model": "gpt2"}, {"pre": "tekken"}),
    "a name": ("mistral3", "mistral3", {"model": "gpt2", "pre": "llama-bpe"}, {"pre": "llama-bpe"}),
    "GLM 4.7 Flash": ("glm4_moe_lite", "glm4moelite", {"model": "gpt2", "pre": "default"}, {"pre": "glm4"}),
    "Gemma 4": ("gemma4", "gemma4", {"model": "llama", "merges": ["a b"]}, {"model": "gemma4"}),
    "Gemma 3": ("gemma3", "gemma3", {"model": "llama", "pre": "default"}, {"model": "llama", "pre": "default"}),
    "Llama 3": ("llama", "llama", {"model": "gpt2", "tokens": ["x"] * 128009 + ["<|eot_id|>"]}, {"pre": "llama-bpe"}),
    "Llama": ("llama", "llama", {"model": "gpt2", "tokens": TOKENS}, {"pre": None}),
}


@pytest.mark.parametrize(("name", "architecture", "given", "expected"), TOKENIZERS.values(), ids=TOKENIZERS.keys())
def test_tokenizers_that_ollamas_graphs_know_better(name: str, architecture: str, given: Hyper, expected: Hyper, tmp_path: Path) -> None:
    _, hyper, arrays = golden(name)
    others = {f"tokenizer.ggml.{key}": value for key, value in given.items()}
    checkpoint = GGUFCheckpoint(write_model(tmp_path / "x.gguf", architecture, hyper, arrays, others))
    assert {key: checkpoint.metadata.get(f"tokenizer.ggml.{key}") for key in expected} == expected
    checkpoint.close()


def test_tokens_without_a_row_in_the_embedding_are_left_out(tmp_path: Path) -> None:
    _, hyper, arrays = golden("gemma3")
    rows = arrays["token_embd.weight"].shape[0]
    others = {"tokenizer.ggml.tokens": [f"t{n}" for n in range(rows + 2)], "tokenizer.ggml.scores": [0.5] * (rows + 2)}
    checkpoint = GGUFCheckpoint(write_model(tmp_path / "x.gguf", "gemma3", hyper, arrays, others))
    assert len(checkpoint.metadata["tokenizer.ggml.tokens"]) == len(checkpoint.metadata["tokenizer.ggml.scores"]) == rows
    checkpoint.close()
