"""ERNIE 4.5."""

from __future__ import annotations

from ..architecture import EXPERTS, LLAMA, GGUFArchitecture, TensorTable, shared_expert_names
from ..base_config import Config, Source, dense_config
from ..transforms import flat


def _ernie(source: Source) -> Config:
    return dense_config(source, "ernie4_5") | {"use_bias": source.has("blk.0.attn_q.bias")}


def _ernie_moe(source: Source) -> Config:
    """The file's width of the shared experts is llama.cpp's own; in the model it is a multiple of the other experts'."""
    hparams = source.hparams
    hparams.take("expert_shared_feed_forward_length")
    return dense_config(source, "ernie4_5_moe") | {
        "use_bias": source.has("blk.0.attn_q.bias"),
        "moe_num_experts": hparams.integer("expert_count"),
        "moe_k": hparams.integer("expert_used_count"),
        "moe_intermediate_size": hparams.integer("expert_feed_forward_length"),
        "moe_num_shared_experts": hparams.integer("expert_shared_count", 0, low=0),
        "moe_layer_start_index": hparams.integer("leading_dense_block_count", 0, low=0),
        "moe_layer_interval": hparams.integer("interleave_moe_layer_step", 1),
    }


ARCHITECTURES = {
    "ernie4_5": GGUFArchitecture(_ernie, TensorTable(LLAMA)),
    "ernie4_5-moe": GGUFArchitecture(
        _ernie_moe,
        TensorTable(
            LLAMA | EXPERTS | shared_expert_names("mlp.shared_experts") | {"exp_probs_b.bias": "mlp.e_score_correction_bias"},
            {"exp_probs_b.bias": flat()},
        ),
    ),
}
