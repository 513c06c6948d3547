"""Qwen 2 and 3, and the text models of Qwen2-VL, Qwen2.5-VL and Qwen3-VL."""

from __future__ import annotations

from ..architecture import EXPERTS, LLAMA, QK_NORMS, GGUFArchitecture, TensorTable
from ..base_config import Config, Source, dense_config, with_sections


def _qwen2(source: Source) -> Config:
    return with_sections(source, dense_config(source, "qwen2"))


def _qwen3(source: Source) -> Config:
    return with_sections(source, dense_config(source, "qwen3")) | {"attention_bias": False}


def _qwen3_moe(source: Source) -> Config:
    config = with_sections(source, dense_config(source, "qwen3_moe")) | qwen_experts(source) | {"attention_bias": False}
    dense = [layer for layer in range(config["num_hidden_layers"]) if not source.has(f"blk.{layer}.ffn_gate_inp.weight")]
    return config | {"decoder_sparse_step": 1, "mlp_only_layers": dense}


def qwen_experts(source: Source) -> Config:
    hparams = source.hparams
    return {
        "num_experts": hparams.integer("expert_count"),
        "num_experts_per_tok": hparams.integer("expert_used_count"),
        "moe_intermediate_size": hparams.integer("expert_feed_forward_length"),
        "norm_topk_prob": hparams.boolean("expert_weights_norm", True),
    }


ARCHITECTURES = {
    "qwen2": GGUFArchitecture(_qwen2, TensorTable(LLAMA)),
    "qwen3": GGUFArchitecture(_qwen3, TensorTable(LLAMA | QK_NORMS)),
    "qwen3moe": GGUFArchitecture(_qwen3_moe, TensorTable(LLAMA | QK_NORMS | EXPERTS)),
}
