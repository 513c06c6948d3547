"""MiniMax M2."""

from __future__ import annotations

from ..architecture import LLAMA, QK_NORMS, GGUFArchitecture, TensorTable, expert_names
from ..base_config import SIGMOID, Config, Source, base_config, check_scores


def _minimax(source: Source) -> Config:
    hparams = source.hparams
    config = base_config(source, "minimax_m2", partial_rope=True)
    hparams.integer("feed_forward_length", 1)
    check_scores(source, SIGMOID)
    return config | {
        "hidden_act": "silu",
        "rotary_dim": int(config.pop("partial_rotary_factor") * config["head_dim"]),
        "intermediate_size": hparams.integer("expert_feed_forward_length"),
        "num_local_experts": hparams.integer("expert_count"),
        "num_experts_per_tok": hparams.integer("expert_used_count"),
    }


ARCHITECTURES = {
    "minimax-m2": GGUFArchitecture(
        _minimax,
        TensorTable(
            LLAMA
            | QK_NORMS
            | expert_names("block_sparse_moe.gate", "block_sparse_moe.switch_mlp")
            | {"exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias"}
        ),
    ),
}
