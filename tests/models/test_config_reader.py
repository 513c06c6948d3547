"""Every understood key of a config has its effect; any other is an error that names it."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.models.published_configs import PHI4_MINI, PUBLISHED, QWEN25, WRAPPED

from mlxinfer.errors import UnsupportedModelError
from mlxinfer.models import FAMILIES, architecture, build, supports
from mlxinfer.models.config_reader import ConfigReader
from mlxinfer.models.vlm_text import text_config

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def windows(config: dict[str, Any]) -> list[int | None]:
    return [spec.window for spec in architecture(config).specs]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_understood(name: str) -> None:
    config = PUBLISHED[name]
    plan = architecture(config)
    # Nemotron-H's feed-forward layers are layers of their own, which keep nothing.
    kept = sum(letter in "M*" for letter in config["hybrid_override_pattern"]) if "hybrid_override_pattern" in config else None
    assert len(plan.specs) == (config["num_hidden_layers"] if kept is None else kept)
    if plan.ropes:
        assert max(rope.context for rope in plan.ropes.values()) == config["max_position_embeddings"]


@pytest.mark.parametrize("name", WRAPPED)
def test_the_text_part_of_published_configs_is_understood(name: str) -> None:
    config = WRAPPED[name]
    assert supports(config["model_type"])
    text = config["text_config"]
    # Layers that read the pages of others keep nothing.
    assert len(architecture(text_config(config)).specs) == text["num_hidden_layers"] - text.get("num_kv_shared_layers", 0)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_defaults_are_those_of_transformers(model_type: str) -> None:
    from transformers import AutoConfig

    written = architecture(AutoConfig.for_model(model_type).to_dict())
    silent = architecture({"model_type": model_type})
    assert silent.sizes == written.sizes
    assert silent.specs == written.specs
    assert (silent.embedding_scale, silent.logit_scale, silent.logit_cap) == (
        written.embedding_scale,
        written.logit_scale,
        written.logit_cap,
    )
    for key, rope in written.ropes.items():
        np.testing.assert_allclose(silent.ropes[key].frequencies(10), rope.frequencies(10))
        assert (silent.ropes[key].gain, silent.ropes[key].context) == (rope.gain, rope.context)


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("key", ["attention_chunk_size", "clip_qkv", "logit_scale", "num_kv_shared_layers", "altup_num_inputs"])
def test_an_unknown_key_is_named(name: str, key: str) -> None:
    with pytest.raises(UnsupportedModelError, match=key):
        architecture(PUBLISHED[name] | {key: 4})


def test_a_null_says_nothing() -> None:
    assert architecture(QWEN25 | {"clip_qkv": None}).sizes == architecture(QWEN25).sizes


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {"hidden_act": "swoosh"}),
        ("llama", {"sliding_window": 64}),
        ("llama", {"layer_types": ["full_attention", "sliding_attention"]}),
        ("llama", {"partial_rotary_factor": 0.5}),
        ("llama", {"rope_interleaved": True}),
        ("llama", {"head_dim": "64"}),
        ("llama", {"num_key_value_heads": 5}),
        ("llama", {"num_hidden_layers": 0}),
        ("llama", {"hidden_size": True}),
        ("llama", {"rms_norm_eps": None}),
        ("llama", {"rms_norm_eps": float("nan")}),
        ("llama", {"attention_bias": 1}),
        ("mistral", {"attention_bias": True}),
        ("mistral", {"sliding_window": 0}),
        ("mixtral", {"num_experts": 4, "num_local_experts": 8}),
        ("qwen2", {"attention_bias": False, "qkv_bias": False}),
        ("qwen2", {"layer_types": ["sliding_attention"] * 32}),
        ("qwen2", {"layer_types": ["chunked_attention"] * 32}),
        ("qwen2", {"layer_types": ["full_attention"]}),
        ("gemma2", {"use_bidirectional_attention": True}),
        ("gemma2", {"sliding_window_size": 7}),
        ("gemma3_text", {"use_bidirectional_attention": "vision"}),
        ("gemma3_text", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
        ("gemma3_text", {"partial_rotary_factor": 0.5}),
        ("granite", {"logits_scaling": 0}),
        ("phi3", {"lm_head_bias": True}),
        ("phi3", {"full_attn_mod": 2}),
        ("smollm3", {"no_rope_layers": [1, 0]}),
        ("gpt_oss", {"experts_per_token": 2}),
        ("qwen3_next", {"hidden_act": "gelu"}),
        ("qwen3_next", {"linear_num_value_heads": 33}),
        ("qwen3_next", {"linear_conv_kernel_dim": 1}),
        ("qwen3_5_text", {"attn_output_gate": False}),
        ("qwen3_5_text", {"output_gate_type": "sigmoid"}),
        ("qwen3_5_text", {"num_experts": 8}),
    ],
    ids=str,
)
def test_values_without_a_meaning_here_are_named(model_type: str, changes: dict[str, Any]) -> None:
    key = next(iter(changes)) if len(changes) == 1 else list(changes)[-1]
    with pytest.raises(UnsupportedModelError) as caught:
        architecture({"model_type": model_type, **changes})
    shown = {"num_key_value_heads": "key-value heads", "hidden_act": "hidden_act|activation"}.get(key, key)
    assert any(part in str(caught.value) for part in shown.split("|"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("style", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"rope_type": "spiral", "factor": 2.0}, "spiral"),
        ({"type": "su"}, "su"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": 0}, "factor"),
        ({"rope_type": "linear", "factor": "2"}, "factor"),
        ({"rope_type": "default", "factor": 2.0}, "factor"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 3}, "beta_fast"),
        ({"rope_type": "yarn", "factor": 2.0, "llama_4_scaling_beta": 0.1}, "llama_4_scaling_beta"),
        ({"rope_type": "yarn", "factor": 2.0, "truncate": 1}, "truncate"),
        ({"rope_type": "llama3", "factor": 2.0}, "low_freq_factor"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, "short_factor has 1"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 64, "long_factor": ["1"] * 64}, "long_factor"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_type": "default", "mrope_section": [1, 1, 2]}, "mrope_section"),
        (["yarn"], "rope_"),
        (4.0, "rope_"),
    ],
    ids=str,
)
def test_rope_parameters_that_are_not_understood_are_named(style: str, parameters: Any, named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        architecture({"model_type": "llama", style: parameters})


def test_windows_follow_the_rules_of_each_family() -> None:
    assert set(windows(PUBLISHED["mistral-v0.1"])) == {4096}
    assert set(windows(PUBLISHED["mistral-nemo"])) == {None}
    assert set(windows(QWEN25)) == {None}
    assert windows(QWEN25 | {"use_sliding_window": True, "max_window_layers": 22}) == [None] * 22 + [32768] * 2
    assert windows(PUBLISHED["gemma-2"])[:3] == [4096, None, 4096]
    assert windows(PUBLISHED["gemma-3-1b"])[:7] == [512] * 5 + [None, 512]
    assert windows(PUBLISHED["gpt-oss"])[:2] == [128, None]


def test_ropes_follow_the_rules_of_each_family() -> None:
    phi = architecture(PHI4_MINI).ropes["rope"]
    assert (phi.dims, phi.boundary) == (96, 4096)
    gemma = architecture(PUBLISHED["gemma-3-1b"]).ropes
    assert gemma["full_attention"].frequencies(0)[1] < gemma["sliding_attention"].frequencies(0)[1]
    assert architecture(PUBLISHED["qwen3-next"]).ropes["rope"].dims == 64


def test_context_lengths() -> None:
    assert architecture(PUBLISHED["llama-3.1"] | {"rope_scaling": {"type": "linear", "factor": 4.0}}).ropes["rope"].context == 4 * 131072
    assert architecture(QWEN25 | {"rope_scaling": YARN}).ropes["rope"].context == 131072
    scaled = text_config(WRAPPED["gemma-3-4b"])
    assert {rope.context for rope in architecture(scaled).ropes.values()} == {131072}


def test_the_trained_length_beside_the_parameters_goes_before_the_one_in_them() -> None:
    inside = {"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48, "original_max_position_embeddings": 64}
    config = PHI4_MINI | {"rope_scaling": inside, "original_max_position_embeddings": 512}
    assert architecture(config).ropes["rope"].boundary == 512


def test_unknown_architectures_are_named() -> None:
    for unknown in ("nonesuch", None, ["llama"]):
        with pytest.raises(UnsupportedModelError, match=r"nonesuch|None|llama"):
            build({"model_type": unknown}, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "key", ["_anything", "image_token_id", "hidden_dropout", "router_z_loss_coef", "unsloth_tags", "initializer_factor"]
)
def test_bookkeeping_and_training_are_let_pass(key: str) -> None:
    assert architecture(QWEN25 | {key: 7}).sizes == architecture(QWEN25).sizes


@given(
    st.dictionaries(
        st.text("abcxyz", min_size=3, max_size=8), st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5), max_size=4
    )
)
def test_a_reader_never_lets_a_key_pass_unseen(config: dict[str, Any]) -> None:
    reader = ConfigReader(config)
    if any(value is not None for value in config.values()):
        with pytest.raises(UnsupportedModelError):
            reader.finish()
    for key in config:
        reader.take(key)
    reader.finish()


_KEYS = sorted({key for config in PUBLISHED.values() for key in config} - {"model_type"})
_VALUES = st.none() | st.booleans() | st.integers(-3, 40) | st.floats() | st.text(max_size=4) | st.lists(st.integers(-2, 3), max_size=3)


@given(st.sampled_from(sorted(FAMILIES)), st.dictionaries(st.sampled_from(_KEYS), _VALUES, max_size=3))
def test_nonsense_values_never_end_in_a_traceback(model_type: str, changes: dict[str, Any]) -> None:
    with contextlib.suppress(UnsupportedModelError):
        architecture({"model_type": model_type, "num_hidden_layers": 2, **changes})


def test_yarn_whose_gain_is_undone() -> None:
    """As DeepSeek-R1-0528-Qwen3-8B has it."""
    parameters = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    usual = architecture({"model_type": "qwen3", "rope_scaling": parameters}).ropes["rope"].gain
    undone = architecture({"model_type": "qwen3", "rope_scaling": parameters | {"attn_factor": 0.8782488562869419}}).ropes["rope"].gain
    assert usual == pytest.approx(1.13863, abs=1e-4)
    assert undone == pytest.approx(1.0)


def test_dual_chunk_attention_bounds_the_context() -> None:
    """As Qwen2.5-7B-Instruct-1M has it: within a chunk it is plain attention."""
    chunks = {"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144}
    found = architecture(QWEN25 | {"max_position_embeddings": 1010000, "dual_chunk_attention_config": chunks})
    assert found.ropes["rope"].context == found.sizes.positions == 253952
    assert any("253952" in note for note in found.notes)
    with pytest.raises(UnsupportedModelError, match="dual_chunk_attention_config"):
        architecture(QWEN25 | {"dual_chunk_attention_config": 3})
