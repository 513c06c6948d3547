"""MTP heads in NumPy, from their definitions only.

Sources: arXiv:2412.19437, section 2.2; vLLM's `Qwen3NextMultiTokenPredictor` and `DeepSeekMultiTokenPredictor`. Position t has the pair of
token t + 1 and the model's row of token t; the pairs of a sequence attend causally, one fewer than its tokens. There are no pages, steps or
shifted rows here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]
Tensors = Mapping[str, Array]


def rms(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def turned(x: Array, theta: float, dims: int) -> Array:
    """Rope by halves on the first `dims` channels of `[T, heads, dim]`."""
    angles = np.arange(len(x))[:, None] / theta ** (np.arange(0, dims, 2) / dims)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = x[..., : dims // 2], x[..., dims // 2 : dims]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., dims:]], -1)


def attention(q: Array, k: Array, v: Array, scale: float) -> Array:
    """Causal, `[T, heads, dim]`, KV heads shared evenly. Returns `[T, heads * dim]`."""
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = np.einsum("thd,shd->hts", q, k) * scale
    scores = np.where(np.tri(len(q), dtype=bool), scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    return np.einsum("hts,shd->thd", shares, v).reshape(len(q), -1)


def mlp(w: Tensors, name: str, x: Array) -> Array:
    return (silu(x @ w[f"{name}.gate_proj.weight"].T) * (x @ w[f"{name}.up_proj.weight"].T)) @ w[f"{name}.down_proj.weight"].T


def llama_layer(w: Tensors, name: str, x: Array, c: Mapping[str, Any]) -> Array:
    heads, dim, eps = c["num_attention_heads"], c["head_dim"], c["rms_norm_eps"]
    y = rms(x, w[f"{name}.input_layernorm.weight"], eps)
    q, k, v = ((y @ w[f"{name}.self_attn.{part}_proj.weight"].T).reshape(len(x), -1, dim) for part in "qkv")
    assert q.shape[1] == heads
    y = attention(turned(q, c["rope_theta"], dim), turned(k, c["rope_theta"], dim), v, dim**-0.5)
    x = x + y @ w[f"{name}.self_attn.o_proj.weight"].T
    return x + mlp(w, f"{name}.mlp", rms(x, w[f"{name}.post_attention_layernorm.weight"], eps))


def qwen_layer(w: Tensors, name: str, x: Array, c: Mapping[str, Any]) -> Array:
    """Gated attention with norms of heads, and a dense feed-forward part."""
    heads, dim, eps, rope = c["num_attention_heads"], c["head_dim"], c["rms_norm_eps"], c["rope_parameters"]
    y = rms(x, w[f"{name}.input_layernorm.weight"], eps)
    both = (y @ w[f"{name}.self_attn.q_proj.weight"].T).reshape(len(x), heads, 2 * dim)
    k, v = ((y @ w[f"{name}.self_attn.{part}_proj.weight"].T).reshape(len(x), -1, dim) for part in "kv")
    q, k = rms(both[..., :dim], w[f"{name}.self_attn.q_norm.weight"], eps), rms(k, w[f"{name}.self_attn.k_norm.weight"], eps)
    dims = int(dim * rope["partial_rotary_factor"])
    y = attention(turned(q, rope["rope_theta"], dims), turned(k, rope["rope_theta"], dims), v, dim**-0.5)
    y = y / (1 + np.exp(-both[..., dim:].reshape(len(x), -1)))
    x = x + y @ w[f"{name}.self_attn.o_proj.weight"].T
    return x + mlp(w, f"{name}.mlp", rms(x, w[f"{name}.post_attention_layernorm.weight"], eps))


def pairs(w: Tensors, names: tuple[str, str, str], embedded: Array, hidden: Array, eps: float) -> Array:
    """Rows 0 to T - 2 of what the layer reads: the embedding of token t + 1 and the model's row of token t, each normed, then projected.
    `names`: of the norm of embeddings, the norm of rows, and the projection."""
    token, row, join = (w[f"{name}.weight"] for name in names)
    both = np.concatenate([rms(embedded[1:], token, eps), rms(hidden[:-1], row, eps)], -1)
    return both @ join.T


def latent_layer(w: Tensors, name: str, x: Array, c: Mapping[str, Any]) -> Array:
    """Latent attention, its keys and values written out for every head, and experts next to a shared one (GLM-4.7-Flash)."""
    heads, plain, theta, eps = c["num_attention_heads"], c["qk_nope_head_dim"], c["rope_parameters"]["rope_theta"], c["rms_norm_eps"]
    part = f"{name}.self_attn"
    y = rms(x, w[f"{name}.input_layernorm.weight"], eps)
    q = rms(linear(w, f"{part}.q_a_proj", y), w[f"{part}.q_a_layernorm.weight"], 1e-6)
    q = linear(w, f"{part}.q_b_proj", q).reshape(len(x), heads, -1)
    both = linear(w, f"{part}.kv_a_proj_with_mqa", y)
    latent = rms(both[:, : c["kv_lora_rank"]], w[f"{part}.kv_a_layernorm.weight"], 1e-6)
    shared = np.repeat(turned_in_pairs(both[:, None, c["kv_lora_rank"] :], theta), heads, 1)
    k = np.concatenate([np.einsum("tl,hlp->thp", latent, w[f"{part}.embed_q.weight"]), shared], -1)
    v = np.einsum("tl,hvl->thv", latent, w[f"{part}.unembed_out.weight"])
    q = np.concatenate([q[..., :plain], turned_in_pairs(q[..., plain:], theta)], -1)
    x = x + linear(w, f"{part}.o_proj", attention(q, k, v, q.shape[-1] ** -0.5))
    y = rms(x, w[f"{name}.post_attention_layernorm.weight"], eps)
    return x + experts(w, f"{name}.mlp", y, c["num_experts_per_tok"], c["routed_scaling_factor"]) + mlp(w, f"{name}.mlp.shared_experts", y)


def linear(w: Tensors, name: str, x: Array) -> Array:
    y: Array = x @ w[f"{name}.weight"].T
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def turned_in_pairs(x: Array, theta: float) -> Array:
    """Rope of neighbouring channels, `[T, heads, dim]`; by halves afterwards, which scores do not show."""
    return turned(np.concatenate([x[..., ::2], x[..., 1::2]], -1), theta, x.shape[-1])


def experts(w: Tensors, name: str, x: Array, count: int, scale: float) -> Array:
    """The likeliest by a sigmoid and a bias, weighted by the sigmoid alone."""
    found = np.zeros_like(x)
    for row, y in enumerate(x):
        scores = 1 / (1 + np.exp(-w[f"{name}.gate.weight"] @ y))
        chosen = np.argsort(-(scores + w[f"{name}.gate.e_score_correction_bias"]))[:count]
        for expert in chosen:
            own = {f"e.{part}.weight": w[f"{name}.switch_mlp.{part}.weight"][expert] for part in ("gate_proj", "up_proj", "down_proj")}
            found[row] += scale * scores[expert] / scores[chosen].sum() * mlp(own, "e", y)
    return found


def nemotron_layer(w: Tensors, x: Array, c: Mapping[str, Any]) -> Array:
    """Attention without positions, then a feed-forward part with squared ReLU, each with a norm before it."""
    y = rms(x, w["mtp.layers.0.norm.weight"], 1e-5)
    q, k, v = (linear(w, f"mtp.layers.0.mixer.{part}_proj", y).reshape(len(x), -1, c["head_dim"]) for part in "qkv")
    x = x + linear(w, "mtp.layers.0.mixer.o_proj", attention(q, k, v, c["head_dim"] ** -0.5))
    y = rms(x, w["mtp.layers.1.norm.weight"], 1e-5)
    return x + linear(w, "mtp.layers.1.mixer.down_proj", np.maximum(linear(w, "mtp.layers.1.mixer.up_proj", y), 0) ** 2)
