from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.processes.examples import examples

from mlxinfer.errors import CheckpointError, MLXInferError, UnsupportedModelError
from mlxinfer.loading.gguf.families import rebuild_config
from mlxinfer.loading.gguf.files import GGUFFiles
from mlxinfer.loading.gguf.hparams import short_float
from tests.support.formats.gguf_file import Tensor, Typed, array_tensor, write

LLAMA = {
    "block_count": 2,
    "embedding_length": 32,
    "context_length": 512,
    "attention.head_count": 4,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "feed_forward_length": 64,
}
TENSORS = [array_tensor(name, np.zeros((7, 32))) for name in ("token_embd.weight", "output.weight")]
RECURRENT = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 8,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 32,
    "rope.dimension_count": 2,
}
SECTIONS = {"rope.dimension_sections": [1, 1, 2, 0]}
PLAIN, THREE, TRAINED = {"rope_type": "default"}, {"mrope_section": [1, 1, 2]}, {"original_max_position_embeddings": 512}
EXPERTS = {"expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 16}


def config_of(
    path: Path, architecture: str = "llama", changes: dict[str, Any] | None = None, tensors: list[Tensor] | None = None, **general: Any
) -> dict[str, Any]:
    """Rebuild a config. `changes` are hyperparameters; None removes one."""
    hyper = {key: value for key, value in (LLAMA | (changes or {})).items() if value is not None}
    metadata = {"general.architecture": architecture} | {f"{architecture}.{key}": value for key, value in hyper.items()}
    metadata |= {key.replace("__", "."): value for key, value in general.items()}
    files = GGUFFiles(write(path / "x.gguf", metadata, TENSORS + (tensors or [])))
    try:
        return rebuild_config(files)
    finally:
        files.close()


def test_llama(tmp_path: Path) -> None:
    assert config_of(tmp_path, tokenizer__ggml__bos_token_id=3, tokenizer__ggml__eos_token_id=5, tokenizer__ggml__padding_token_id=0) == {
        "model_type": "llama",
        "vocab_size": 7,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "bos_token_id": 3,
        "eos_token_id": 5,
        "pad_token_id": 0,
    }


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mistral": ("llama", {"attention.sliding_window": 24}, {"model_type": "mistral", "sliding_window": 24}),
    "olmo3": ("olmo2", {"attention.sliding_window": 9}, {"model_type": "olmo3", "sliding_window": 9}),
    "mixtral": ("llama", EXPERTS, {"model_type": "mixtral", "num_local_experts": 6, "num_experts_per_tok": 2}),
    "one value for each layer": ("llama", {"attention.head_count_kv": [2, 2]}, {"num_key_value_heads": 2}),
    "qwen3": ("qwen3", {"attention.key_length": 16, "attention.value_length": 16}, {"head_dim": 16}),
    "qwen3moe": (
        "qwen3moe",
        EXPERTS | {"expert_group_count": 0, "expert_weights_norm": True},
        {"num_experts": 6, "moe_intermediate_size": 16, "norm_topk_prob": True, "mlp_only_layers": [0, 1]},
    ),
    "qwen2 with sections": ("qwen2", SECTIONS, {"model_type": "qwen2", "rope_scaling": {**PLAIN, **THREE}}),
    "qwen3 with sections": ("qwen3", SECTIONS | {"n_deepstack_layers": 3}, {"model_type": "qwen3", "rope_scaling": {**PLAIN, **THREE}}),
    "qwen3 with sections and yarn": (
        "qwen3",
        SECTIONS | {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
        {"rope_scaling": {"rope_type": "yarn", "type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, **TRAINED, **THREE}},
    ),
    "qwen3moe with sections": ("qwen3moe", EXPERTS | SECTIONS, {"model_type": "qwen3_moe", "rope_scaling": {**PLAIN, **THREE}}),
    "qwen35": (
        "qwen35",
        RECURRENT | SECTIONS,
        {"model_type": "qwen3_5_text", "rope_scaling": {**PLAIN, **THREE}},
    ),
    "gemma2": (
        "gemma2",
        {"attention.sliding_window": 9},
        {
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 9,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "query_pre_attn_scalar": 8,
        },
    ),
    "gemma3 without windows": ("gemma3", {}, {"layer_types": ["full_attention"] * 2, "final_logit_softcapping": None}),
    "gemma3": (
        "gemma3",
        {"attention.sliding_window": 9, "rope.freq_base": 1e6, "rope.freq_base_swa": 5e3},
        {"layer_types": ["sliding_attention"] * 2, "rope_theta": 1e6, "rope_local_base_freq": 5e3},
    ),
    "gemma3 with a pattern": (
        "gemma3",
        {"attention.sliding_window": 9, "attention.sliding_window_pattern": [False, True]},
        {"layer_types": ["full_attention", "sliding_attention"]},
    ),
    "gemma3 with a period": (
        "gemma3",
        {"attention.sliding_window": 9, "attention.sliding_window_pattern": 2},
        {"layer_types": ["sliding_attention", "full_attention"]},
    ),
    "phi3": (
        "phi3",
        {"attention.sliding_window": 0, "rope.scaling.original_context_length": 128, "rope.dimension_count": 6},
        {"sliding_window": None, "original_max_position_embeddings": 128, "partial_rotary_factor": 0.75, "rope_scaling": None},
    ),
    "granite": (
        "granite",
        {"attention.scale": 0.25, "embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 8.0},
        {"attention_multiplier": 0.25, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0},
    ),
    "smollm3": ("smollm3", {"block_count": 2}, {"no_rope_layers": [1, 1], "no_rope_layer_interval": 4}),
    "gpt-oss": (
        "gpt-oss",
        EXPERTS | {"attention.sliding_window": 9, "rope.scaling.type": "yarn", "rope.scaling.factor": 8.0},
        {"intermediate_size": 16, "layer_types": ["sliding_attention", "full_attention"], "swiglu_limit": 7.0},
    ),
    "qwen3next": (
        "qwen3next",
        EXPERTS | RECURRENT | {"expert_shared_feed_forward_length": 24, "full_attention_interval": 2},
        {"layer_types": ["linear_attention", "full_attention"], "linear_value_head_dim": 8, "partial_rotary_factor": 0.25},
    ),
    "qwen35 that predicts a second token": (
        "qwen35",
        RECURRENT | {"nextn_predict_layers": 1, "attention.recurrent_layers": [True, False], "rope.dimension_sections": [1, 0, 0, 0]},
        {"num_hidden_layers": 1, "layer_types": ["linear_attention"], "linear_num_value_heads": 4},
    ),
}


@pytest.mark.parametrize(("architecture", "changes", "expected"), CASES.values(), ids=CASES.keys())
def test_architectures(tmp_path: Path, architecture: str, changes: dict[str, Any], expected: dict[str, Any]) -> None:
    config = config_of(tmp_path, architecture, changes)
    assert expected.items() <= config.items()


def test_biases_and_the_head_follow_from_the_tensors(tmp_path: Path) -> None:
    biases = [array_tensor(f"blk.0.{name}.bias", np.zeros(2)) for name in ("attn_q", "ffn_up")]
    assert {"attention_bias": True, "mlp_bias": True}.items() <= config_of(tmp_path, tensors=biases).items()
    metadata = {"general.architecture": "llama"} | {f"llama.{key}": value for key, value in LLAMA.items()}
    files = GGUFFiles(write(tmp_path / "y.gguf", metadata, [TENSORS[0], *biases]))
    assert rebuild_config(files)["tie_word_embeddings"] is True


def rope(tmp_path: Path, changes: dict[str, Any], **tensors: list[float]) -> Any:
    extra = [array_tensor(f"{name}.weight", np.array(values)) for name, values in tensors.items()]
    return config_of(tmp_path, changes=changes, tensors=extra)["rope_scaling"]


def test_linear_and_yarn_ropes(tmp_path: Path) -> None:
    linear = {"rope_type": "linear", "type": "linear", "factor": 4.0}
    assert rope(tmp_path, {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}) == linear
    assert rope(tmp_path, {"rope.scale_linear": 4.0}) == linear
    assert rope(tmp_path, {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}) is None
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128}
    expected = {"factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 32.0, "beta_slow": 1.0}
    assert rope(tmp_path, yarn) == {"rope_type": "yarn", "type": "yarn"} | expected
    assert rope(tmp_path, yarn | {"rope.scaling.yarn_attn_factor": 1.5})["attention_factor"] == 1.5
    assert rope(tmp_path, yarn | {"rope.scaling.attn_factor": 2.0})["attention_factor"] == pytest.approx(2 * (1 + 0.1 * np.log(4)))


def test_explicit_divisors(tmp_path: Path) -> None:
    assert rope(tmp_path, {}, rope_freqs=[1.0] * 4) is None
    divisors = [1.0, 1.5, 3.0, 4.0]
    scaling = rope(tmp_path, {}, rope_freqs=divisors)
    assert scaling["rope_type"] == "longrope"
    assert scaling["long_factor"] == scaling["short_factor"] == divisors
    assert (scaling["attention_factor"], scaling["original_max_position_embeddings"]) == (1.0, 512)
    doubled = rope(tmp_path, {"rope.scaling.factor": 2.0}, rope_freqs=divisors)
    assert doubled["long_factor"] == [2.0, 3.0, 6.0, 8.0]
    longrope = {"rope.scaling.type": "longrope", "rope.scaling.original_context_length": 64, "rope.scaling.attn_factor": 1.25}
    scaling = rope(tmp_path, longrope, rope_factors_long=divisors, rope_factors_short=[1.0] * 4)
    assert (scaling["long_factor"], scaling["short_factor"]) == (divisors, [1.0] * 4)
    assert (scaling["attention_factor"], scaling["original_max_position_embeddings"]) == (1.25, 64)


def test_the_divisors_of_llama_3_are_recognized(tmp_path: Path) -> None:
    """Head size 64, base 500000, factor 32: Llama 3.2 1B."""
    frequencies = 500000.0 ** (-np.arange(32) / 32)
    wavelengths = 2 * np.pi / frequencies
    smooth = (8192 / wavelengths - 1) / 3
    divisors = np.where(wavelengths < 8192 / 4, 1, np.where(wavelengths > 8192, 32, 1 / ((1 - smooth) / 32 + smooth)))
    sizes = {"embedding_length": 32, "attention.key_length": 64, "attention.value_length": 64, "rope.freq_base": 500000.0}
    expected = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    assert rope(tmp_path, sizes, rope_freqs=list(divisors)) == {"rope_type": "llama3", "type": "llama3"} | expected
    divisors[10] *= 1.01
    assert rope(tmp_path, sizes, rope_freqs=list(divisors))["rope_type"] == "longrope"


UNSUPPORTED: dict[str, tuple[str, dict[str, Any], str]] = {
    "architecture": ("gpt2", {}, "'gpt2' is not supported"),
    "unknown key": ("llama", {"attention.secret": 1}, "llama.attention.secret = 1 is not understood"),
    "a key of another architecture": ("llama", {"attn_logit_softcapping": 30.0}, "llama.attn_logit_softcapping is 30.0"),
    "four positions": ("qwen3", {"rope.dimension_sections": [1, 1, 1, 1]}, "rope.dimension_sections does not hold three numbers"),
    "seen both ways": ("llama", {"attention.causal": False}, "llama.attention.causal is False"),
    "groups of experts": ("qwen3moe", EXPERTS | {"expert_group_count": 4}, "expert_group_count is 4"),
    "sigmoid gates": ("qwen3moe", EXPERTS | {"expert_gating_func": 2}, "expert_gating_func is 2"),
    "head counts by layer": ("llama", {"attention.head_count_kv": [2, 1]}, "head_count_kv differs from layer to layer"),
    "value length": ("llama", {"attention.value_length": 4}, "value_length differs from key_length"),
    "partial rope": ("llama", {"rope.dimension_count": 4}, "rope.dimension_count is 4 of 8"),
    "rope type": ("llama", {"rope.scaling.type": "new"}, "rope.scaling.type is 'new'"),
    "yarn that extrapolates": (
        "llama",
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_ext_factor": 0.5},
        "yarn_ext_factor is not 1",
    ),
    "yarn's logarithm": (
        "llama",
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_log_multiplier": 0.1},
        "yarn_log_multiplier is not 0",
    ),
    "gain": ("llama", {"rope.scaling.attn_factor": 2.0}, "attn_factor is 2.0"),
    "granite without rope": ("granite", {"logit_scale": 1.0, "rope.scaling.finetuned": False}, "finetuned is false"),
}


@pytest.mark.parametrize(("architecture", "changes", "message"), UNSUPPORTED.values(), ids=UNSUPPORTED.keys())
def test_what_is_not_supported_is_named(tmp_path: Path, architecture: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        config_of(tmp_path, architecture, changes)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"block_count": None}, "llama.block_count is missing"),
    "zero": ({"attention.head_count": 0}, "head_count is 0, must be a whole number of at least 1"),
    "text": ({"embedding_length": "a\nb"}, r"embedding_length is 'a\\nb'"),
    "fraction": ({"context_length": 1.5}, "context_length is 1.5"),
    "flag": ({"block_count": True}, "block_count is True"),
    "layers": ({"block_count": 2**31 - 1}, "leaves 2147483647 layers for 2 tensors"),
    "no layers": ({"nextn_predict_layers": 2}, "leaves 0 layers"),
    "infinite": ({"rope.freq_base": float("inf")}, "freq_base is inf"),
    "negative": ({"attention.layer_norm_rms_epsilon": -1.0}, "must be above 0"),
    "longrope without divisors": ({"rope.scaling.type": "longrope"}, "rope_factors_long.weight is missing"),
}


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD.keys())
def test_senseless_values_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        config_of(tmp_path, changes=changes)


@pytest.mark.parametrize(
    ("key", "message"), [("ssm.time_step_rank", "not a multiple of the 2 key heads"), ("ssm.inner_size", "of the 4 heads")]
)
def test_heads_that_do_not_divide(tmp_path: Path, key: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        config_of(tmp_path, "qwen35", RECURRENT | {key: 5})


@pytest.mark.parametrize("values", [[1.0, 2.0], [1.0, 2.0, 0.0, 1.0], [1.0, 2.0, float("nan"), 1.0]])
def test_bad_divisors(tmp_path: Path, values: list[float]) -> None:
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight must hold 4 positive divisors"):
        rope(tmp_path, {}, rope_freqs=values)


def test_files_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="holds a 'mmproj', not a model"):
        config_of(tmp_path, general__type="mmproj")
    with pytest.raises(UnsupportedModelError, match="quantization version 1"):
        config_of(tmp_path, general__quantization_version=1)
    with pytest.raises(CheckpointError, match="architecture is missing"):
        rebuild_config(GGUFFiles(write(tmp_path / "y.gguf", {"general.name": "x"}, TENSORS)))
    metadata = {"general.architecture": "llama"} | {f"llama.{key}": value for key, value in LLAMA.items()}
    with pytest.raises(CheckpointError, match=r"token_embd\.weight is missing"):
        rebuild_config(GGUFFiles(write(tmp_path / "z.gguf", metadata, [*TENSORS[1:], array_tensor("a", np.zeros(1))])))


@settings(max_examples=examples(150), deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_value_of_any_key_is_taken_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(CASES)))
    architecture, changes, _ = CASES[name]
    strange = [
        0,
        1,
        2**32 - 1,
        -1.0,
        float("nan"),
        "",
        "x\ny",
        True,
        [1, 2],
        [0.5],
        ["a"],
        Typed("u64", 2**64 - 1),
        Typed("array", [], of="u32"),
    ]
    key = data.draw(st.sampled_from(sorted(LLAMA | changes)))
    try:
        config_of(tmp_path, architecture, changes | {key: data.draw(st.sampled_from(strange))})
    except MLXInferError as error:
        assert "\n" not in str(error)  # noqa: PT017


def test_short_floats() -> None:
    assert short_float(float(np.float32(1e-5))) == 1e-5
    assert short_float(float(np.float32(0.1))) == 0.1
    assert short_float(0.1) == 0.1
    assert short_float(1 / 3) == 1 / 3
