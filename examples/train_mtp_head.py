"""Train a head that drafts for a model of the Llama family, on text that the model writes itself: one more layer, which reads the model's
hidden rows and the next token, and predicts the token after it. The embedding and the output matrix are the model's own.

    python examples/train_mtp_head.py MODEL HEAD       MODEL: a Hugging Face directory, or a GGUF file; HEAD: a new directory

It needs torch and transformers (and accelerate, for GGUF files), takes a GPU where there is one, and goes on with the texts that were
written when it was stopped (`texts-*.pt`, with the model's hidden rows). After that, `mlxinfer run MODEL --draft HEAD`. Options: --texts N,
--writing N (minutes at most), --minutes N (of training), --turns N (tokens drafted one after another), --vocabulary N (tokens it can
propose), --bits 4 or 8 (of the head's matrices), --dtype bfloat16 (several times as fast on processors that multiply such numbers, and the
default on a GPU). On a busy machine one thread (OMP_NUM_THREADS=1) does more than two that wait for one another.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import head_texts
import numpy as np
import torch
from head_texts import Teacher, rotated, write
from safetensors.torch import save_file
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

RATE, BATCH, HELD = 1e-3, 12, 64
"""Peak learning rate, texts of a step, and texts that only measure, at most half of all."""
WEIGHTS = (1.0, 0.8, 0.6, 0.5)
"""Of the loss of the first, second and further tokens drafted."""
LIKELIEST = 32
"""Of the model's probabilities so many are learnt from."""


class Head(torch.nn.Module):
    """The parameters, by their names in the head's file."""

    def __init__(self, config: dict[str, Any], tokens: torch.Tensor) -> None:
        super().__init__()
        hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
        self.eps, self.heads, self.kv = config["rms_norm_eps"], heads, config["num_key_value_heads"]
        self.dim = config.get("head_dim") or hidden // heads
        theta = (config.get("rope_parameters") or config).get("rope_theta", 10000.0)
        angles = torch.arange(head_texts.MOST)[:, None] / theta ** (torch.arange(0, self.dim, 2) / self.dim)
        self.register_buffer("turns", torch.stack([torch.cat([part] * 2, -1)[:, None] for part in (angles.cos(), angles.sin())]))
        self.register_buffer("tokens", tokens)
        shapes = {"mtp.fc": (hidden, 2 * hidden)}
        for name, shape in (("q", (heads, hidden)), ("k", (self.kv, hidden)), ("v", (self.kv, hidden)), ("o", (hidden, heads))):
            shapes[f"mtp.layers.0.self_attn.{name}_proj"] = tuple(self.dim * n if n != hidden else n for n in shape)
        for name, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
            shapes[f"mtp.layers.0.mlp.{name}_proj"] = shape
        self.weights = torch.nn.ParameterDict()
        for name, shape in shapes.items():
            small = 0.2 if name.endswith(("o_proj", "down_proj")) else 1.0
            self.weights[name.replace(".", "/")] = torch.nn.Parameter(torch.randn(shape) * small * shape[1] ** -0.5)
        norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "layers.0.input_layernorm", "layers.0.post_attention_layernorm")
        for name in norms:
            self.weights["mtp/" + name.replace(".", "/")] = torch.nn.Parameter(torch.ones(hidden))

    def start(self, teacher: Teacher, ids: torch.Tensor, from_row: int) -> None:
        """Begin with the model's last layer and last norm, after what predicts best, without a layer, what enters that layer from a token
        and the hidden row before it. `ids` `[B, L]` are texts without an end; the first rows, alike in all of them, are left out."""
        entering, rows = teacher.rows(ids, 0, teacher.room(len(ids)))
        embedded = teacher.model.model.embed_tokens(ids)[:, from_row:]
        both = torch.cat([rms_norm(x.float(), x.shape[-1:]) for x in (embedded, rows[:, from_row - 1 : -1])], -1).flatten(0, 1)
        wanted = entering[:, from_row:].flatten(0, 1).float()
        weights = torch.linalg.solve(both.T @ both + 10 * torch.eye(both.shape[1], device=both.device), both.T @ wanted)
        last, norm = teacher.layers[-1].state_dict(), teacher.model.model.norm.weight
        known = {f"mtp.layers.0.{key.removesuffix('.weight')}": value for key, value in last.items()}
        known |= {"mtp.fc": weights.T, "mtp.norm": norm}
        with torch.no_grad():
            for key, value in known.items():
                self.weights[key.replace(".", "/")][:] = value

    def forward(self, embedded: torch.Tensor, before: torch.Tensor, past: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """A turn over all positions `[B, L, hidden]`: position p sees rows of the first turn up to p - n, after n earlier turns, and one
        row of each later turn. The same as `mlxinfer/models/heads/llama.py`."""
        w, name = {key.replace("/", "."): value.to(embedded.dtype) for key, value in self.weights.items()}, "mtp.layers.0."
        norm = lambda x, key: rms_norm(x, x.shape[-1:], w[key], self.eps)  # noqa: E731
        parts = norm(embedded, "mtp.pre_fc_norm_embedding"), norm(before, "mtp.pre_fc_norm_hidden")
        x = linear(torch.cat(parts, -1), w["mtp.fc"])
        y = norm(x, name + "input_layernorm")
        q, k, v = (linear(y, w[f"{name}self_attn.{part}_proj"]).unflatten(-1, (-1, self.dim)) for part in "qkv")
        x = x + linear(self.attend(self.turn(q), self.turn(k), v, past).flatten(-2), w[name + "self_attn.o_proj"])
        y = norm(x, name + "post_attention_layernorm")
        y = silu(linear(y, w[name + "mlp.gate_proj"])) * linear(y, w[name + "mlp.up_proj"])
        return norm(x + linear(y, w[name + "mlp.down_proj"]), "mtp.norm")

    def turn(self, x: torch.Tensor) -> torch.Tensor:
        return rotated(x, *self.turns[:, : x.shape[1]]).to(x.dtype)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, past: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        past.append((k.repeat_interleave(self.heads // self.kv, 2), v.repeat_interleave(self.heads // self.kv, 2)))
        (keys, values), later = past[0], len(past) - 1
        if not later:
            heads = (part.transpose(1, 2) for part in (q, keys, values))
            return scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)
        scores = torch.einsum("blhd,bshd->bhls", q, keys).float() * self.dim**-0.5
        position = torch.arange(q.shape[1], device=q.device)
        scores = scores.masked_fill(position[None] > position[:, None] - later, -1e9)
        own = [(shifted(k, later - n), shifted(v, later - n)) for n, (k, v) in enumerate(past) if n]
        extra = [torch.einsum("blhd,blhd->bhl", q, k).float()[..., None] * self.dim**-0.5 for k, _ in own]
        share = torch.cat([scores, *extra], -1).softmax(-1).to(q.dtype)
        y = torch.einsum("bhls,bshd->blhd", share[..., : keys.shape[1]], values)
        for n, (_, v) in enumerate(own):
            y = y + share[..., keys.shape[1] + n].transpose(1, 2)[..., None] * v
        return y


def shifted(x: torch.Tensor, count: int) -> torch.Tensor:
    """`[B, L, ...]` moved this many positions later, with zeros before."""
    return x if not count else torch.cat([torch.zeros_like(x[:, :count]), x[:, :-count]], 1)


class Likelihood(torch.autograd.Function):
    """The cross entropy of rows through the head's output matrix with a few known probabilities, summed up; and how often the likeliest
    token is the one wanted. Its gradient is computed at once, as nothing of the size of the vocabulary should be kept."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, output: torch.Tensor, chances: torch.Tensor, ids: torch.Tensor, best: torch.Tensor) -> Any:
        logits = linear(rows, output).float()
        whole, total = logits.logsumexp(-1, keepdim=True), chances.sum(-1, keepdim=True)
        loss = (total * whole).sum() - (logits.gather(1, ids) * chances).sum()
        right = (logits.argmax(-1) == best).sum()
        slope = (logits - whole).exp_().mul_(total).scatter_add_(1, ids, -chances)
        ctx.save_for_backward(slope.to(rows.dtype) @ output)
        return loss, right

    @staticmethod
    def backward(ctx: Any, loss: torch.Tensor, right: torch.Tensor) -> Any:
        return ctx.saved_tensors[0] * loss.to(ctx.saved_tensors[0].dtype), None, None, None, None


class Known:
    """What the model makes of texts, computed once: every turn of the training reads it."""

    def __init__(self, teacher: Teacher, texts: dict[str, torch.Tensor], tokens: torch.Tensor) -> None:
        """`texts` as `write` returns them; `tokens` are the head's vocabulary."""
        self.ids, self.rows, self.first = (texts[key].to(teacher.device) for key in ("ids", "rows", "first"))
        self.table, self.output = teacher.model.model.embed_tokens.weight, teacher.output[tokens]
        number = torch.full((len(teacher.output),), -1, device=teacher.device)
        number[tokens] = torch.arange(len(tokens), device=teacher.device)
        likely = min(LIKELIEST, len(tokens))
        shape, device = self.ids.shape, teacher.device
        self.places = torch.zeros(*shape, likely, dtype=torch.int32, device=device)
        self.chances = torch.zeros(*shape, likely, dtype=torch.float16, device=device)
        self.best = torch.full(shape, -1, device=device)
        greedy = (texts["temperatures"].to(device) == 0)[:, None].expand(shape)
        for at in range(0, len(self.ids), 16):
            part = slice(at, at + 16)
            there, said = self.there(part), number[self.ids[part].roll(-1, 1)]
            logits = linear(self.rows[part][there], self.output).float()
            top, places = logits.topk(likely, -1)
            known = ~greedy[part][there] | (said[there] >= 0)  # a token that the head cannot propose is nothing to learn from
            self.places[part][there] = places.int()
            self.chances[part][there] = ((top - logits.logsumexp(-1, keepdim=True)).exp() * known[:, None]).half()
            self.best[part][there] = torch.where(greedy[part][there], said[there], places[:, 0])

    def there(self, texts: slice | torch.Tensor) -> torch.Tensor:
        """Which rows are followed by a token of the model's own: bool `[B, L]`."""
        position = torch.arange(self.ids.shape[1], device=self.ids.device)
        return (self.ids[texts].roll(-1, 1) >= 0) & (position >= self.first[texts][:, None] - 1) & (position < len(position) - 1)

    def losses(self, head: Head, texts: slice | torch.Tensor, turns: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """For the first, second and further tokens drafted: the cross entropy with the model's own probabilities, as far as they are in the
        head's vocabulary, and how often its likeliest token is the model's."""
        length = int((self.ids[texts] >= 0).sum(1).max()) - 1
        there, ids, rows = self.there(texts)[:, :length], self.ids[texts, :length].clamp_min(0), self.rows[texts, :length]
        before, past, found = shifted(rows, 1), [], []
        for turn in range(turns):
            y = head(self.table[ids], before, past)
            ahead = there.clone()
            ahead[:, :turn] = False
            chances, places = self.chances[texts, :length][ahead].float(), self.places[texts, :length][ahead].long()
            loss, right = Likelihood.apply(y[ahead], self.output, chances, places, self.best[texts, :length][ahead])
            found.append((loss / len(chances), right / len(chances)))
            before = shifted(y, 1)
        return found


def train(teacher: Teacher, texts: dict[str, torch.Tensor], target: Path, minutes: float, turns: int, vocabulary: int, bits: int) -> None:
    """AdamW on batches of whole texts; the head's own rows are fed back for every token after the first, as they are when it drafts. That
    begins in the second half: until then the first token is all there is to learn."""
    torch.manual_seed(0)
    ids = texts["ids"]
    counts = torch.bincount(ids[ids >= 0], minlength=len(teacher.output))
    tokens = counts.argsort(descending=True)[:vocabulary].sort().values
    print(f"{vocabulary} tokens are {counts[tokens].sum() / counts.sum():.4f} of all", flush=True)
    if len(ids) < 2:
        raise SystemExit("one text is too few to train a head and to measure it: give more --texts, or more minutes of --writing")
    aside = min(HELD, len(ids) // 2)
    halves = ({key: value[part] for key, value in texts.items()} for part in (slice(aside), slice(aside, None)))
    held, rest = (Known(teacher, part, tokens.to(teacher.device)) for part in halves)
    head = Head(teacher.config, tokens).to(teacher.device)
    whole = rest.ids[(rest.ids >= 0).all(1)][:48]
    if len(whole):
        head.start(teacher, whole, int(rest.first.min()))
    optimizer = torch.optim.AdamW(head.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    began, told, step, order = time.monotonic(), 0.0, 0, []
    while (done := (time.monotonic() - began) / (60 * minutes)) < 1:
        order = order or list(batches(rest.ids))
        for group in optimizer.param_groups:
            group["lr"] = RATE * min((step + 1) / 20, 1.0) * max(1 - done, 0.01)
        found = rest.losses(head, order.pop().to(teacher.device), turns if done > 0.5 else 1)
        optimizer.zero_grad()
        sum(weight * loss for weight, (loss, _) in zip(WEIGHTS, found, strict=False)).backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        step += 1
        if time.monotonic() - told > 120:
            told = time.monotonic()
            print(f"step {step}, {60 * minutes * done:.0f} s: held", *shares(head, held), flush=True)
            export(head, teacher.config, target, bits)
    export(head, teacher.config, target, bits)
    print(f"step {step}: held", *shares(head, held))


def batches(ids: torch.Tensor) -> Iterator[torch.Tensor]:
    """Indices of all texts in batches of about one length, in random order."""
    order, lengths = torch.randperm(len(ids)), (ids >= 0).sum(1).cpu()
    groups = [group[lengths[group].argsort()] for group in order.split(8 * BATCH)]
    alike = [batch for group in groups for batch in group.split(BATCH)]
    yield from (alike[n] for n in torch.randperm(len(alike)).tolist())


def shares(head: Head, held: Known) -> list[str]:
    """How often each draft is the model's likeliest token in texts that were held out."""
    with torch.no_grad():
        texts = [slice(first, first + 32) for first in range(0, len(held.ids), 32)]
        parts = [[right.item() for _, right in held.losses(head, some, 4)] for some in texts]
    return [f"{np.mean(part):.3f}" for part in zip(*parts, strict=True)]


def quantized(value: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`[n, k]` in 4 or 8 bits with a scale and an offset for 64 numbers, as MLX stores them: codes uint32, scales and offsets bfloat16."""
    groups, most = value.unflatten(1, (-1, 64)), 2**bits - 1
    low, high = groups.amin(-1), groups.amax(-1)
    scales, biases = ((high - low) / most).clamp_min(1e-8).to(torch.bfloat16), low.to(torch.bfloat16)
    codes = ((groups - biases.float()[..., None]) / scales.float()[..., None]).round().clamp(0, most).to(torch.uint8).flatten(1).numpy()
    if bits == 4:
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    return torch.from_numpy(np.ascontiguousarray(codes).view(np.uint32).view(np.int32)).view(torch.uint32), scales, biases


def export(head: Head, config: dict[str, Any], target: Path, bits: int) -> None:
    """A directory that `--draft` takes."""
    tensors = {}
    for key, value in head.weights.items():
        name, value = key.replace("/", "."), value.detach().float().cpu()
        if value.ndim == 1:
            tensors[name + ".weight"] = value.to(torch.bfloat16)
            continue
        codes, scales, biases = quantized(value, bits)
        tensors |= {name + ".weight": codes, name + ".scales": scales, name + ".biases": biases}
    save_file(tensors, str(target / "model.safetensors"), metadata={"format": "mlx"})
    taken = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps")
    taken += ("rope_theta", "rope_parameters", "max_position_embeddings")
    kept = {key: config[key] for key in taken if config.get(key) is not None}
    kept |= {"model_type": "mtp_head", "num_hidden_layers": 1, "quantization": {"group_size": 64, "bits": bits}}
    kept["draft_vocabulary"] = head.tokens.tolist()
    (target / "config.json").write_text(json.dumps(kept) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("head", type=Path)
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--writing", type=float, default=60.0)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--bits", type=int, choices=(4, 8), default=8)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16" if torch.cuda.is_available() else "float32")
    given = parser.parse_args()
    given.head.mkdir(parents=True, exist_ok=True)
    teacher = Teacher(given.model, "cuda" if torch.cuda.is_available() else "cpu", getattr(torch, given.dtype))
    texts = write(teacher, given.texts, given.writing, given.head)
    train(teacher, texts, given.head, given.minutes, given.turns, given.vocabulary, given.bits)


if __name__ == "__main__":
    main()
