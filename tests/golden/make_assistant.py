"""Tiny random Gemma 4 assistants, written by transformers 5.23, with what they draft in float32 after tokens that a golden Gemma 4 read.

Run with a Python that has torch and transformers, from `tests`: `python golden/make_assistant.py`. Writes assistant/<target>/: config.json,
model.safetensors, reference.npz. `lengths` are the tokens that the target has read, `logits` `[lengths, 3, vocab]` and `rows`
`[lengths, 3, hidden of the target]` what the assistant says in three turns, of which each reads the likeliest token of the one before.

transformers cuts the keys that a window leaves by another rule for a prompt than for single tokens; here they are cut as the target's own
query at that place would see them. And it refuses configs whose layers all read others' keys, as an assistant's do: `all_read` mends that.
"""

from __future__ import annotations

import pathlib
import sys

import numpy as np

HERE = pathlib.Path(__file__).parent
SLIDING, FULL = "sliding_attention", "full_attention"
LENGTHS = [1, 5, 60, 64, 65, 97]
TEXT = {
    "vocab_size": 96,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "sliding_window": 24,
    "layer_types": [SLIDING, SLIDING, FULL],
    "num_hidden_layers": 3,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
}
CASES = {
    "gemma4_text": ({"global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True}, {}),
    "gemma4_text_shared": (
        {"global_head_dim": 24},
        {"use_ordered_embeddings": True, "num_centroids": 12, "centroid_intermediate_top_k": 4},
    ),
}


def main() -> None:
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache, Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig

    all_read(Gemma4TextConfig)
    for name, (text, more) in CASES.items():
        target = AutoModelForCausalLM.from_pretrained(HERE / "arch" / name, attn_implementation="eager", dtype=torch.float32).eval()
        types = target.config.layer_types[: target.config.num_hidden_layers - target.config.num_kv_shared_layers]
        hidden = target.config.hidden_size
        config = Gemma4AssistantConfig(text_config=Gemma4TextConfig(**TEXT, **text), backbone_hidden_size=hidden, **more)
        torch.manual_seed(7)
        made = Gemma4AssistantForCausalLM._from_config(config, attn_implementation="eager").float().eval()
        randomize(torch, made)
        ids = torch.from_numpy(np.load(HERE / "arch" / name / "reference.npz")["ids"])[None]
        logits, rows = [], []
        for length in LENGTHS:
            with torch.no_grad():
                cache = DynamicCache()
                read = target(ids[:, :length], past_key_values=cache, use_cache=True, output_hidden_states=True)
                sources = {kind: len(types) - 1 - types[::-1].index(kind) for kind in (SLIDING, FULL)}
                shared = {kind: (cache.layers[at].keys, cache.layers[at].values) for kind, at in sources.items()}
                seen = TEXT["sliding_window"] - 1
                shared[SLIDING] = tuple(part[:, :, -seen:] for part in shared[SLIDING])
                token, row, said = ids[:, length : length + 1], read.hidden_states[-1][:, -1:], ([], [])
                for _ in range(3):
                    both = torch.cat([target.get_input_embeddings()(token), row], -1)
                    out = made(inputs_embeds=both, position_ids=torch.tensor([[length]]), shared_kv_states=shared)
                    token, row = out.logits.argmax(-1), out.last_hidden_state
                    said[0].append(out.logits[0, 0].numpy())
                    said[1].append(row[0, 0].numpy())
            logits.append(said[0])
            rows.append(said[1])
        place = HERE / "assistant" / name
        place.mkdir(parents=True, exist_ok=True)
        made.save_pretrained(place)
        (place / "generation_config.json").unlink(missing_ok=True)
        said32 = {"logits": np.array(logits, np.float32), "rows": np.array(rows, np.float32)}
        np.savez_compressed(place / "reference.npz", lengths=LENGTHS, ids=ids[0].numpy(), **said32)
        sys.stdout.write(f"{name}: largest logit {np.abs(logits).max():.2f}, {sum(f.stat().st_size for f in place.iterdir())} bytes\n")


def all_read(kind: type) -> None:
    """Let a config have no layer that keeps keys and values."""
    modes = kind.kv_sharing_modes.fget  # type: ignore[attr-defined]

    def mended(config: object) -> list[str | None]:
        layers, shared = config.num_hidden_layers, config.num_kv_shared_layers  # type: ignore[attr-defined]
        return ["reuse"] * layers if layers == shared else modes(config)

    kind.kv_sharing_modes = property(mended)  # type: ignore[attr-defined]


def randomize(torch: object, model: object) -> None:
    """Other numbers than transformers begins with, so that every tensor matters."""
    with torch.no_grad():  # type: ignore[attr-defined]
        for name, tensor in model.named_parameters():  # type: ignore[attr-defined]
            if tensor.dim() >= 2:
                tensor.normal_(0, 0.25)
            else:
                tensor.add_(torch.randn_like(tensor) * 0.1)  # type: ignore[attr-defined]
            if "norm" in name and tensor.dim() == 1:
                tensor.abs_()
        for name, tensor in model.named_buffers():  # type: ignore[attr-defined]
            if "layer_scalar" in name:
                tensor.uniform_(0.6, 1.4)
            if "token_ordering" in name:
                tensor.copy_(torch.randperm(len(tensor)))  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
