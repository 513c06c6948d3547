"""Every key that llama.cpp or Ollama writes is read, ignored as harmless, or refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gguf.constants import Keys

from mlxinfer.errors import UnsupportedModelError
from mlxinfer.loading.gguf import GGUFCheckpoint
from mlxinfer.loading.gguf.hparams import _RULES, REFUSED, is_harmless
from mlxinfer.models.vlm_text import TEXT_ONLY
from tests.support.formats.gguf_file import Typed
from tests.support.formats.gguf_golden import GOLDEN, golden, rewritten, write_model

OLLAMA = """
attention.causal attention.head_count attention.head_count_kv attention.key_length attention.layer_norm_epsilon
attention.layer_norm_rms_epsilon attention.value_length audio.attention.head_count audio.block_count audio.conv_kernel_size
audio.embedding_length audio.feed_forward_length audio.num_mel_bins audio.sample_rate block_count context_length embedding_length
attention.key_length_mla attention.value_length_mla attention.kv_lora_rank attention.q_lora_rank expert_count expert_used_count
expert_feed_forward_length expert_shared_feed_forward_length expert_gating_func expert_group_count expert_group_used_count
expert_shared_count expert_weights_norm expert_weights_scale feed_forward_length leading_dense_block_count rope.dimension_count
rope.freq_base rope.scaling.factor rope.scaling.type rope.scaling.original_context_length rope.scaling.yarn_log_multiplier
rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow rope.scaling.attn_factor rope.freq_base_swa rope.dimension_count_swa
full_attention_interval attention.sliding_window attention.sliding_window_pattern attn_logit_softcapping final_logit_softcapping
pooling_type mm.tokens_per_image rope.global.freq_base rope.local.freq_base rope.scaling.beta_fast rope.scaling.beta_slow
rope.scaling.extrapolation_factor vision.block_count vision.image_size vision.projector.scale_factor vision.rope.freq_base
attention.key_length_swa attention.value_length_swa attention.shared_kv_layers embedding_length_per_layer_input image_token_id
image_start_token_id image_end_token_id video_token_id video_start_token_id video_end_token_id nextn_predict_layers rope.mrope_section
vocab_size shortconv.l_cache attention.head_dim logit_scale attention.temperature_scale image_token_index mm.projector_bias
mm.projector_hidden_act rope.scaling.mscale rope.scaling.mscale_all_dim rope.scaling_beta spatial_merge_size mrope_sections
n_deepstack_layers norm_top_k_prob normalize_embeddings rope.dimension_sections rope.mrope_interleaved source_fp8_tensors
source_quantization ssm.conv_kernel ssm.group_count ssm.inner_size ssm.state_size ssm.time_step_rank ssm.v_head_reordered
vision_start_token_id vision_end_token_id sam.block_count
"""
"""Keys under the architecture's name that any version of Ollama's `convert/` has written, for supported architectures."""
GGUF = Path(__file__).parents[3] / "mlxinfer" / "loading" / "gguf"
SOURCE = "".join(path.read_text() for path in (GGUF / "base_config.py", *(GGUF / "families").rglob("*.py")))
TRANSLATED = "".join(path.read_text() for path in GGUF.glob("ollama*.py"))


def llama_cpp(holder: type = Keys) -> Iterator[str]:
    for name, value in vars(holder).items():
        if isinstance(value, type) and not name.startswith("_"):
            yield from llama_cpp(value)
        elif isinstance(value, str) and value.startswith("{arch}.") and "{dense}" not in value:
            yield value.removeprefix("{arch}.")


@pytest.mark.parametrize("key", sorted({*llama_cpp(), *OLLAMA.split()}))
def test_every_key_is_read_harmless_or_refused_with_a_reason(key: str) -> None:
    """A key is never both harmless and refused. Architectures that need such a key may still read it."""
    is_read = f'"{key}"' in SOURCE or f'"{key}"' in TRANSLATED or f'"{key.removesuffix("_mla")}{{end}}"' in SOURCE.replace('f"', '"')
    is_known = key in _RULES or is_harmless(key, 1, {}) is True
    assert is_read or is_known or key in REFUSED
    assert not (is_known and key in REFUSED)


HARMLESS: dict[str, Any] = {
    "vision.block_count": 3,
    "audio.sample_rate": 16000,
    "image_token_id": 5,
    "initializer_range": 0.02,
    "attention_dropout": 0.1,
    "training.steps": 1000,
    "source_quantization": "hf_fp8",
    "attention.scale": 0.25,
    "attention.sliding_window": 4096,
    "attention.sliding_window_pattern": [True, False],
    "attention.clamp_kqv": 0.0,
    "attn_logit_softcapping": 0.0,
    "logit_scale": 1.0,
    "embedding_scale": 0.0,
    "swiglu_clamp_exp": [0.0, 0.0],
    "expert_count": 0,
    "expert_used_count": 2,
    "rope.freq_base_swa": 10000.0,
    "rope.scaling.yarn_beta_fast": 32.0,
    "leading_dense_block_count": 0,
}


def test_keys_that_change_nothing_are_accepted(tmp_path: Path) -> None:
    checkpoint = GGUFCheckpoint(rewritten("qwen3", tmp_path / "x.gguf", HARMLESS))
    golden_checkpoint = GGUFCheckpoint(GOLDEN / "qwen3.gguf")
    assert {key: value for key, value in checkpoint.config.items() if key != TEXT_ONLY} == {
        key: value for key, value in golden_checkpoint.config.items() if not key.endswith("_token_id")
    }
    checkpoint.close()
    golden_checkpoint.close()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.scale", 0.3),
        ("attention.sliding_window", 64),
        ("attention.clamp_kqv", 8.0),
        ("attn_logit_softcapping", 30.0),
        ("logit_scale", 0.5),
        ("swiglu_clamp_exp", [0.0, 7.0]),
        ("expert_count", 4),
        ("attention.max_alibi_bias", float("nan")),
        ("ssm.dt_b_c_rms", True),
    ],
)
def test_other_values_of_them_are_refused_by_name(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"qwen3\.{re.escape(key)} .*--ignore-config-key qwen3\.{re.escape(key)}"):
        GGUFCheckpoint(rewritten("qwen3", tmp_path / "x.gguf", {key: value}))


@pytest.mark.parametrize("key", REFUSED)
def test_keys_that_change_the_maths_are_refused_with_the_reason(key: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=re.escape(f"qwen3.{key} = 1 {REFUSED[key]}")):
        GGUFCheckpoint(rewritten("qwen3", tmp_path / "x.gguf", {key: 1}))


OTHERS: dict[str, Any] = {
    "general.base_model.0.repo_url": "https://huggingface.co/x/y",
    "general.quantized_by": "bartowski",
    "general.sampling.top_k": 20,
    "general.tags": ["unsloth", "x"],
    "general.parameter_count": Typed("u64", 8030261312),
    "quantize.imatrix.file": "x.imatrix",
    "quantize.imatrix.entries_count": 448,
    "mradermacher.quantize_version": "2",
    "lmstudio.version": "1",
    "mostly": "unknown",
    "split.tensors.count": 27,
    "tokenizer.ggml.add_space_prefix": False,
    "tokenizer.ggml.new_key": 3,
    "tokenizer.chat_template.tool_use": "{{ x }}",
    "adapter.type": "lora",
    "llama.block_count": 99,
    "clip.has_vision_encoder": True,
    "imatrix.chunk_count": 3,
}


def test_keys_of_other_kinds_never_refuse_a_model(tmp_path: Path) -> None:
    architecture, hyper, arrays = golden("qwen3")
    others = OTHERS | {"split.tensors.count": len(arrays)}
    GGUFCheckpoint(write_model(tmp_path / "x.gguf", architecture, hyper, arrays, others)).close()
