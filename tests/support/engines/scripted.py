"""A model that says what it was told to: one text at first, another one after tools have answered."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer

from ..models.tiny_directory import JSON_CHARACTERS, tiny_directory

SIZE = 128
_FIRST, _AFTER = "[first]", "[after]"
_TEMPLATE = (
    "{% set seen = namespace(results=0) %}{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>"
    "{% if '<tool_response>' in m.content %}{% set seen.results = seen.results + 1 %}{% endif %}{% endfor %}"
    f"{{% if add_generation_prompt %}}{{{{ '{_AFTER}' if seen.results >= CALLS else '{_FIRST}' }}}}{{% endif %}}"
)


def scripted_directory(target: Path, first: str, after: str = "All done.", context: int = 65536, calls: int = 1) -> Path:
    """Write the directory and return it. Both texts are tokens of their own; a token says which one follows it, whatever came before.
    `after` comes once there are so many results of `calls`."""
    tiny_directory(target, characters=JSON_CHARACTERS)
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in (_FIRST, _AFTER, first, after)])
    tokenizer.save(str(target / "tokenizer.json"))
    settings = json.loads((target / "tokenizer_config.json").read_text())
    (target / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": _TEMPLATE.replace("CALLS", str(calls))}))
    token = tokenizer.token_to_id
    end = token("</s>")
    follows = {token(_FIRST): token(first), token(_AFTER): token(after), token(first): end, token(after): end}
    mx.save_safetensors(str(target / "model.safetensors"), _weights(follows))
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": SIZE,
        "intermediate_size": SIZE,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": SIZE,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": context,
        "tie_word_embeddings": False,
        "eos_token_id": end,
        "bos_token_id": token("<s>"),
    }
    (target / "config.json").write_text(json.dumps(config))
    return target


def _weights(follows: dict[int, int]) -> dict[str, mx.array]:
    """One-hot embeddings, a layer that adds nothing, and a row of the head for each token that follows another."""
    eye, nothing = mx.eye(SIZE), mx.zeros((SIZE, SIZE))
    head = mx.zeros((SIZE, SIZE))
    for token, after in follows.items():
        head[after, token] = 10.0
    layer = "model.layers.0"
    tensors = {
        "model.embed_tokens.weight": eye,
        "model.norm.weight": mx.ones((SIZE,)),
        "lm_head.weight": head,
        f"{layer}.input_layernorm.weight": mx.ones((SIZE,)),
        f"{layer}.post_attention_layernorm.weight": mx.ones((SIZE,)),
        f"{layer}.self_attn.k_proj.weight": mx.zeros((SIZE // 2, SIZE)),
        f"{layer}.self_attn.v_proj.weight": mx.zeros((SIZE // 2, SIZE)),
    }
    matrices = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    return {name: value.astype(mx.bfloat16) for name, value in {**tensors, **{f"{layer}.{m}.weight": nothing for m in matrices}}.items()}
