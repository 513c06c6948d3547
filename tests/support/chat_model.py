"""A tiny model directory that can chat: random weights, a tokenizer of single bytes, a chat template."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONTEXT = 512
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 258,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "eos_token_id": 257,
}


def write_chat_model(directory: Path, *, template: str | None = TEMPLATE, context: int = CONTEXT) -> Path:
    """Its greedy answers go on for ever: the end of the turn has a logit of zero, below the largest of the others."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(CONFIG | {"max_position_embeddings": context}))
    mx.save_safetensors(str(directory / "model.safetensors"), _weights(np.random.default_rng(0)), {"format": "pt"})
    _tokenizer().save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in settings.items() if v is not None}))
    return directory


def _tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    return tokenizer


def _weights(rng: np.random.Generator) -> dict[str, mx.array]:
    hidden, inner, kv, vocab = CONFIG["hidden_size"], CONFIG["intermediate_size"], 32, CONFIG["vocab_size"]
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for i in range(CONFIG["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.self_attn.{n}_proj.weight": s
            for n, s in (("q", (64, hidden)), ("k", (kv, hidden)), ("v", (kv, hidden)), ("o", (hidden, 64)))
        }
        shapes |= {
            f"{layer}.mlp.{n}_proj.weight": s for n, s in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner)))
        }
        shapes |= {f"{layer}.{n}_layernorm.weight": (hidden,) for n in ("input", "post_attention")}
    weights = {name: rng.standard_normal(shape).astype(np.float32) * (0.3 if len(shape) > 1 else 0.1) for name, shape in shapes.items()}
    embedding = weights["model.embed_tokens.weight"]
    # Only printable ASCII can win: the rows of all other bytes, and of the special tokens, give a logit of zero.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    for row in range(vocab):
        if row >= len(alphabet) or not ("!" <= alphabet[row] <= "~"):
            embedding[row] = 0.0
    return {name: mx.array(array) for name, array in weights.items()}
