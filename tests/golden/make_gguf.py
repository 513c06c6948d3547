"""Tiny random models, one per GGUF architecture: transformers' float32 logits, and the file that llama.cpp's own converter makes.

Run with a Python that has torch, transformers and gguf, and with the root of a llama.cpp checkout (one that has `conversion/`):
`python make_gguf.py LLAMA_CPP [NAME...]` writes gguf/<name>.gguf and gguf/<name>.npz (ids [72], logits [72, 96]).
What llama.cpp has in code rather than in the file (which layers have a window, which have no rope) is as it assumes.
"""

from __future__ import annotations

import pathlib
import sys
import tempfile
from typing import Any

import numpy as np

OUT = pathlib.Path(__file__).parent / "gguf"
VOCAB, TOKENS = 96, 72
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 48}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1],
    "long_factor": [2.0, 3.0],
    "original_max_position_embeddings": 32,
    "partial_rotary_factor": 0.5,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
DELTA = {"linear_num_value_heads": 6, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "head_dim": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True, "decoder_sparse_step": 1}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rope_theta": 100000.0, "head_dim": 16, "rope_scaling": LLAMA3, "tie_word_embeddings": True},
    "llama_linear": {
        "model_type": "llama",
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "attention_bias": True,
        "mlp_bias": True,
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen2": {"model_type": "qwen2", "rope_theta": 1000000.0},
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "rope_scaling": YARN},
    "qwen3moe": dict(model_type="qwen3_moe", head_dim=16, mlp_only_layers=[], **EXPERTS),
    "qwen3next": dict(
        model_type="qwen3_next",
        shared_expert_intermediate_size=16,
        mlp_only_layers=[],
        layer_types=["linear_attention", "full_attention"],
        **DELTA,
        **EXPERTS,
    ),
    "qwen35": dict(model_type="qwen3_5_text", num_hidden_layers=4, **DELTA),
    "gemma2": {
        "model_type": "gemma2",
        "num_hidden_layers": 3,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 24,
        "attn_logit_softcapping": 20.0,
        "final_logit_softcapping": 15.0,
    },
    "gemma3": {"model_type": "gemma3_text", "num_hidden_layers": 7, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 24},
    "phi3": {"model_type": "phi3", "sliding_window": None, "original_max_position_embeddings": 32, "rope_scaling": LONGROPE},
    "granite": {
        "model_type": "granite",
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.3,
        "logits_scaling": 2.0,
    },
    "olmo2": {"model_type": "olmo2"},
    "smollm3": {"model_type": "smollm3", "num_hidden_layers": 5, "no_rope_layers": [1, 1, 1, 0, 1]},
    "gpt-oss": {
        "model_type": "gpt_oss",
        "head_dim": 16,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "sliding_window": 24,
    },
}


def model_of(name: str, settings: dict[str, Any]) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {**BASE, **settings}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    torch.manual_seed(sum(map(ord, name)))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.15)
            elif "norm" in key:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.normal_(0, 0.1)
    return model


def write_vocabulary(converter: Any) -> None:
    writer = converter.gguf_writer
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*(chr(33 + i) for i in range(VOCAB - 3)), '!"', "<a>", "<b>"])
    writer.add_token_types([1] * VOCAB)
    writer.add_token_merges(['! "'])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)


def convert(directory: pathlib.Path, destination: pathlib.Path) -> None:
    """By the class that llama.cpp has for the architecture; only its tokenizer, which these models lack, is replaced."""
    import gguf
    from conversion import get_model_class
    from conversion.base import ModelBase, TextModel

    kind = get_model_class(ModelBase.load_hparams(directory, False)["architectures"][0])
    replaced = {"set_vocab": write_vocabulary, "no_mtp": True, "model_arch": kind.model_arch}
    if "Gemma3" in kind.__name__:
        replaced["modify_tensors"] = lambda self, data, name, bid: TextModel.modify_tensors(self, data + self.norm_shift(name), name, bid)
    kind = type(kind.__name__, (kind,), replaced)
    kind(directory, gguf.LlamaFileType.ALL_F32, destination, eager=True).write()


def main(checkout: str, names: list[str]) -> None:
    sys.path[:0] = [checkout, checkout + "/gguf-py"]
    import torch

    OUT.mkdir(exist_ok=True)
    ids = torch.randint(3, VOCAB, (1, TOKENS), generator=torch.Generator().manual_seed(11))
    for name in names or CASES:
        model = model_of(name, CASES[name])
        with torch.no_grad():
            logits = model(ids).logits[0].numpy().astype(np.float32)
        with tempfile.TemporaryDirectory() as directory:
            model.save_pretrained(directory)
            convert(pathlib.Path(directory), OUT / f"{name}.gguf")
        np.savez_compressed(OUT / f"{name}.npz", ids=ids[0].numpy().astype(np.int32), logits=logits)
        sizes = [(OUT / f"{name}.{end}").stat().st_size for end in ("gguf", "npz")]
        sys.stdout.write(f"{name}: largest logit {np.abs(logits).max():.2f}, bytes {sizes}\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
