"""Train a head that drafts for a model of the Llama family, on text that the model writes itself: one more layer, which reads the model's
hidden rows and the next token, and predicts the token after it. The embedding and the output matrix are the model's own.

    python examples/train_mtp_head.py write MODEL FOLDER      text by the model, with its hidden rows (mlxinfer)
    python examples/train_mtp_head.py train FOLDER HEAD       the head, on the CPU (torch, which may be in another environment)

After that, `mlxinfer run MODEL --draft HEAD`. Options: --tokens N (write), --minutes N (train).
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

TOPICS = (
    """
the sea; a lost key; bread; winter mornings; trains; the moon; bees; an old library; friendship; mountains; music; rain; a garden;
computers; a small town; coffee; dreams; the stars; dogs; birds; a storm; volcanoes; bridges; painting; a lighthouse keeper; chess; the
desert; time; tea; clouds; fire; a broken clock; rivers; school; a letter; glass; honesty; snow; markets; robots; whales; sleep; a
bicycle; photosynthesis; gravity; electricity; the Roman Empire; the French Revolution; democracy; inflation; vaccines; the heart; the
brain; cells; DNA; atoms; magnets; sound; light; earthquakes; dinosaurs; penguins; elephants; recycling; solar power; cooking rice; pasta;
running; yoga; football; swimming; learning a language; public speaking; job interviews; saving money; moving house; a birthday party;
travel to Japan; Paris; New York; camping; photography; poetry; novels; theatre; architecture; mathematics; statistics; probability;
algebra; triangles; prime numbers; sorting a list; reading a file in Python; loops in Python; functions; databases; the internet; email;
passwords; privacy; social media; video games; toys; grandparents; neighbours; cats; horses; forests; farms; soil; cheese; chocolate;
apples; salt; sugar; sleep and health; stress; happiness; kindness; courage; a mystery; a detective; a dragon; a wizard; a spaceship; a
time machine; an island; treasure; a king and a queen
""".strip()
    .replace("\n", " ")
    .split("; ")
)
REQUESTS = (
    "Write a short story about {}.",
    "Explain {} to a child.",
    "Tell me about {}.",
    "Give me five tips or facts about {}.",
    "Write an email to a friend about {}.",
    "What are the advantages and disadvantages of {}?",
    "Write a paragraph about {}.",
    "Why does {} matter? Answer step by step.",
    "Write a dialogue between two people about {}.",
    "Summarize what is known about {}.",
)
BEGINNINGS = ("The history of {} begins", "When I think about {}, I", "Once there was a story about {}:", "# {}\n\n")
MOST, STREAMS = 224, 48
"""Tokens of an answer, and answers written together."""
RATE, BATCH = 6e-4, 6
DRAFT_VOCABULARY = 6144
"""The head proposes the likeliest of these tokens only: a product with the whole output matrix would cost more than the head."""


def prompts(count: int) -> list[tuple[str, bool, float]]:
    """`count` different prompts, whether each is a chat message, and a temperature for its answer."""
    random = np.random.default_rng(0)
    forms = [(form, True) for form in REQUESTS] + [(form, False) for form in BEGINNINGS]
    pairs = list(itertools.product(forms, TOPICS))
    order = itertools.islice(itertools.cycle(random.permutation(len(pairs))), count)
    return [(pairs[i][0][0].format(pairs[i][1]), pairs[i][0][1], (0.0, 0.6, 1.0)[n % 3]) for n, i in enumerate(order)]


def write(model: str, folder: Path, tokens: int) -> None:
    """Answers to many prompts in batches, and the hidden rows of prompts and answers, as the output matrix gets them. Goes on where an
    earlier run was stopped."""
    from mlxinfer import LLM, SamplingParams

    folder.mkdir(parents=True, exist_ok=True)
    llm = LLM(model, max_num_seqs=STREAMS, max_context=1024, dtype="bfloat16", speculate=False, prefix_cache=False)
    save_model(llm, folder)
    asked, known = prompts(3 * tokens // MOST), 0
    for start in range(0, len(asked), STREAMS):
        part, batch = folder / f"texts-{start}.npz", asked[start : start + STREAMS]
        if not part.exists():
            texts = [llm.chat_prompt([{"role": "user", "content": text}]) if chat else text for text, chat, _ in batch]
            params = [SamplingParams(temperature=t, max_tokens=MOST, seed=start + i) for i, (_, _, t) in enumerate(batch)]
            before = [llm.tokenizer.encode(text) if isinstance(text, str) else text.token_ids for text in texts]
            whole = [ids + list(answer.token_ids) for ids, answer in zip(before, llm.generate(texts, params), strict=True)]
            rows = np.concatenate([hidden_rows(llm, ids) for ids in whole])
            np.savez(part, ids=np.concatenate(whole).astype(np.int32), lengths=[len(ids) for ids in whole], rows=rows)
        known += int(np.load(part)["lengths"].sum())
        print(f"{known} tokens", flush=True)
        if known >= tokens:
            return


def hidden_rows(llm: Any, ids: list[int]) -> np.ndarray:
    """The last layer's rows for these tokens after the last norm, float16 `[T, hidden]`."""
    import mlx.core as mx

    from mlxinfer.cache.base import Segment
    from mlxinfer.cache.paged import PagedCache

    model = llm.loaded.model
    cache = PagedCache(model.layers, dtype=llm.loaded.dtype, kv_cache_tokens=2048, chunk=2048)
    step = cache.begin([Segment(cache.open(), 0, len(ids), 0, len(ids))])
    hidden = model.hidden(mx.array(ids, dtype=mx.int32), step)
    return np.array((hidden if model.joined else model.norm(hidden)).astype(mx.float16))


def save_model(llm: Any, folder: Path) -> None:
    """What training needs of the model."""
    import mlx.core as mx

    model = llm.loaded.model
    np.save(folder / "embedding.npy", np.array(model.embedding(mx.arange(model.vocab_size)).astype(mx.float16)))
    (folder / "config.json").write_text(json.dumps(llm.loaded.config))


def train(folder: Path, target: Path, minutes: float, span: tuple[float, float] = (0.0, 1.0)) -> None:
    """AdamW on batches of whole texts. The head learns what the model writes; in the last third its own rows are fed back for the second
    token, as they are when it drafts."""
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(2)
    data = Texts.read(folder)
    head = make_head(data)
    optimizer = torch.optim.AdamW(head.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    kept = target / "training.pt"
    order, held = data.split()
    start, step, told = time.monotonic(), 0, 0.0
    if span[0] and kept.exists():
        state = torch.load(kept)
        head.load_state_dict(state["head"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    while (done := span[0] + (time.monotonic() - start) / (60 * minutes) * (span[1] - span[0])) < span[1]:
        for group in optimizer.param_groups:
            group["lr"] = RATE * min((step + 1) / 30, 1.0) * max(1 - done, 0.02)
        batch = data.batch(order[(step * BATCH + np.arange(BATCH)) % len(order)])
        loss = sum(part for part, _ in losses(head, data, batch, 1 if done < 0.67 else 2))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        step += 1
        if time.monotonic() - told > 60:
            told = time.monotonic()
            print(f"step {step}, epoch {step * BATCH / len(order):.2f}: loss {loss.item():.3f}", *shares(head, data, held), flush=True)
    export(head, data, target)
    torch.save({"head": head.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, kept)
    print(f"step {step}, held-out texts:", *shares(head, data, held))


class Texts:
    """What `write` has left, as tensors."""

    def __init__(self, ids: Any, lengths: np.ndarray, rows: np.ndarray, table: Any, config: dict[str, Any]) -> None:
        import torch

        self.ids, self.rows, self.table, self.config = ids, rows, table, config
        self.ends = np.cumsum(lengths)
        self.starts = self.ends - lengths
        common = np.argsort(-np.bincount(ids, minlength=len(table)), kind="stable")[:DRAFT_VOCABULARY]
        self.tokens = np.sort(common)
        self.number = torch.full((len(table),), -1)
        self.number[torch.from_numpy(self.tokens)] = torch.arange(len(self.tokens))
        self.output = torch.from_numpy(table[self.tokens]).to(torch.bfloat16)

    @classmethod
    def read(cls, folder: Path) -> Texts:
        parts = [np.load(path) for path in sorted(folder.glob("texts-*.npz"))]
        found = [np.concatenate([part[name] for part in parts]) for name in ("ids", "lengths", "rows")]
        return cls(*found, np.load(folder / "embedding.npy"), json.loads((folder / "config.json").read_text()))

    def split(self) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of the texts to learn from, and of those that are held out."""
        order = np.random.default_rng(1).permutation(len(self.ends))
        return order[48:], order[:48]

    def batch(self, numbers: np.ndarray) -> tuple[Any, Any, Any, Any]:
        """Embeddings `[B, L, hidden]` and hidden rows of the tokens, the tokens after them `[B, L]`, and which of them count."""
        import torch

        length = max(int(self.ends[n] - self.starts[n]) for n in numbers) - 1
        embedded, rows = (np.zeros((len(numbers), length, self.rows.shape[1]), np.float16) for _ in range(2))
        following, counts = np.zeros((len(numbers), length), np.int64), np.zeros((len(numbers), length), bool)
        for i, n in enumerate(numbers):
            a, b = self.starts[n], self.ends[n] - 1
            embedded[i, : b - a], rows[i, : b - a] = self.table[self.ids[a:b]], self.rows[a:b]
            following[i, : b - a], counts[i, : b - a] = self.ids[a + 1 : b + 1], True
        return (*(torch.from_numpy(x).to(torch.bfloat16) for x in (embedded, rows)), torch.from_numpy(following), torch.from_numpy(counts))


def make_head(data: Texts) -> Any:
    """The parameters, by their names in the head's file."""
    import torch

    c = data.config
    hidden, inner, heads, kv = c["hidden_size"], c["intermediate_size"], c["num_attention_heads"], c["num_key_value_heads"]
    dim = c.get("head_dim") or hidden // heads
    layer = "mtp.layers.0."
    shapes = {
        "mtp.fc": (hidden, 2 * hidden),
        layer + "self_attn.q_proj": (heads * dim, hidden),
        layer + "self_attn.k_proj": (kv * dim, hidden),
        layer + "self_attn.v_proj": (kv * dim, hidden),
        layer + "self_attn.o_proj": (hidden, heads * dim),
        layer + "mlp.gate_proj": (inner, hidden),
        layer + "mlp.up_proj": (inner, hidden),
        layer + "mlp.down_proj": (hidden, inner),
    }
    norms = [
        "mtp.pre_fc_norm_embedding",
        "mtp.pre_fc_norm_hidden",
        "mtp.norm",
        layer + "input_layernorm",
        layer + "post_attention_layernorm",
    ]
    head = torch.nn.ParameterDict()
    for name, shape in shapes.items():
        small = 0.2 if name.endswith(("o_proj", "down_proj")) else 1.0
        head[name.replace(".", "/")] = torch.nn.Parameter(torch.randn(shape) * small * shape[1] ** -0.5)
    for name in norms:
        head[name.replace(".", "/")] = torch.nn.Parameter(torch.ones(hidden))
    joined, scale = linear_start(data)
    with torch.no_grad():
        head["mtp/fc"][:] = joined
        head["mtp/norm"][:] = scale
    return head


def linear_start(data: Texts, most: int = 40_000) -> tuple[Any, Any]:
    """What predicts the next hidden row best from a token and the row before it, without a layer: `[hidden, 2 * hidden]`, and the size of
    each channel of hidden rows."""
    import torch

    rows = torch.from_numpy(data.rows[:most].astype(np.float32))
    embedded = torch.from_numpy(data.table[data.ids[1 : len(rows)]].astype(np.float32))
    both = torch.cat([x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() for x in (embedded, rows[:-1])], -1)
    scale = rows.pow(2).mean(0).sqrt()
    weights = torch.linalg.solve(both.T @ both + 10 * torch.eye(both.shape[1]), both.T @ (rows[1:] / scale))
    return weights.T, scale


class Layer:
    """The head as a function of its parameters: the same as `mlxinfer/models/llama_head.py`."""

    def __init__(self, head: Any, config: dict[str, Any], length: int) -> None:
        import torch

        self.weights = {name.replace("/", "."): value.to(torch.bfloat16) for name, value in head.items()}
        self.eps, self.heads, self.kv = config["rms_norm_eps"], config["num_attention_heads"], config["num_key_value_heads"]
        self.dim = config.get("head_dim") or config["hidden_size"] // self.heads
        theta = (config.get("rope_parameters") or config).get("rope_theta", 10000.0)
        angles = torch.arange(length)[:, None] / theta ** (torch.arange(0, self.dim, 2) / self.dim)
        self.turns = torch.cat([angles.cos()] * 2, -1)[:, None], torch.cat([angles.sin()] * 2, -1)[:, None]
        self.past: list[tuple[Any, Any]] = []
        self.position = torch.arange(length)

    def norm(self, x: Any, name: str) -> Any:
        from torch.nn.functional import rms_norm

        return rms_norm(x, x.shape[-1:], self.weights[name], self.eps)

    def turn(self, x: Any) -> Any:
        import torch

        a, b = x.chunk(2, -1)
        return (x * self.turns[0] + torch.cat([-b, a], -1) * self.turns[1]).to(x.dtype)

    def __call__(self, embedded: Any, before: Any) -> Any:
        """A turn over all positions `[B, L, hidden]`: position p sees rows of the first turn up to p - n, after n earlier turns, and one
        row of each later turn."""
        import torch
        from torch.nn.functional import linear, silu

        w, name = self.weights, "mtp.layers.0."
        parts = self.norm(embedded, "mtp.pre_fc_norm_embedding"), self.norm(before, "mtp.pre_fc_norm_hidden")
        x = linear(torch.cat(parts, -1), w["mtp.fc"])
        y = self.norm(x, name + "input_layernorm")
        q, k, v = (linear(y, w[f"{name}self_attn.{part}_proj"]).unflatten(-1, (-1, self.dim)) for part in "qkv")
        x = x + linear(self.attend(self.turn(q), self.turn(k), v).flatten(-2), w[name + "self_attn.o_proj"])
        y = self.norm(x, name + "post_attention_layernorm")
        y = silu(linear(y, w[name + "mlp.gate_proj"])) * linear(y, w[name + "mlp.up_proj"])
        return self.norm(x + linear(y, w[name + "mlp.down_proj"]), "mtp.norm")

    def attend(self, q: Any, k: Any, v: Any) -> Any:
        import torch

        self.past.append((k.repeat_interleave(self.heads // self.kv, 2), v.repeat_interleave(self.heads // self.kv, 2)))
        (keys, values), later = self.past[0], len(self.past) - 1
        if not later:
            heads = (part.transpose(1, 2) for part in (q, keys, values))
            return torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)
        scores = torch.einsum("blhd,bshd->bhls", q, keys).float() * self.dim**-0.5
        seen = self.position[None] <= self.position[:, None] - later
        scores = scores.masked_fill(~seen, -torch.inf)
        own = [(shifted(k, later - n), shifted(v, later - n)) for n, (k, v) in enumerate(self.past) if n]
        extra = [torch.einsum("blhd,blhd->bhl", q, k).float()[..., None] * self.dim**-0.5 for k, _ in own]
        share = torch.cat([scores, *extra], -1).softmax(-1).to(q.dtype)
        y = torch.einsum("bhls,bshd->blhd", share[..., : keys.shape[1]], values)
        for n, (_, v) in enumerate(own):
            y = y + share[..., keys.shape[1] + n].transpose(1, 2)[..., None] * v
        return y


def shifted(x: Any, count: int) -> Any:
    """`[B, L, ...]` moved this many positions later, with zeros before."""
    import torch

    return x if not count else torch.cat([torch.zeros_like(x[:, :count]), x[:, :-count]], 1)


def losses(head: Any, data: Texts, batch: tuple[Any, Any, Any, Any], turns: int) -> list[tuple[Any, Any]]:
    """For the first, second and further tokens drafted: the cross entropy with the text, as far as it is in the head's vocabulary, and how
    often the likeliest token is the text's."""
    import torch

    embedded, rows, following, counts = batch
    layer, before, found = Layer(head, data.config, rows.shape[1]), shifted(rows, 1), []
    for turn in range(turns):
        y, late = layer(embedded, before), counts & (torch.arange(rows.shape[1]) >= turn)
        asked = data.number[following[late]]
        known = asked >= 0
        logits = y[late][known] @ data.output.T
        right = (logits.argmax(-1) == asked[known]).float().sum() / len(asked)
        found.append((torch.nn.functional.cross_entropy(logits.float(), asked[known]), right))
        before = shifted(y, 1)
    return found


def shares(head: Any, data: Texts, held: np.ndarray) -> list[str]:
    """How often each draft is the token that follows in texts that were held out."""
    import torch

    with torch.no_grad():
        return [f"{right.item():.3f}" for _, right in losses(head, data, data.batch(held), 3)]


def export(head: Any, data: Texts, target: Path) -> None:
    """A directory that `--draft` takes: matrices in 8 bits with a scale and an offset for 64 numbers, as MLX stores them."""
    import torch
    from safetensors.torch import save_file

    target.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for key, value in head.items():
        name, value = key.replace("/", "."), value.detach().float()
        if value.ndim == 1:
            tensors[name + ".weight"] = value.to(torch.bfloat16)
            continue
        groups = value.unflatten(1, (-1, 64))
        low, high = groups.amin(-1), groups.amax(-1)
        scales, biases = ((high - low) / 255).clamp_min(1e-8).to(torch.bfloat16), low.to(torch.bfloat16)
        codes = ((groups - biases.float()[..., None]) / scales.float()[..., None]).round().clamp(0, 255).to(torch.uint8).flatten(1)
        packed = torch.from_numpy(codes.numpy().view(np.uint32).view(np.int32)).view(torch.uint32)
        tensors |= {name + ".weight": packed, name + ".scales": scales, name + ".biases": biases}
    save_file(tensors, str(target / "model.safetensors"), metadata={"format": "mlx"})
    taken = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps")
    taken += ("rope_theta", "rope_parameters", "max_position_embeddings")
    config = {key: data.config[key] for key in taken if data.config.get(key) is not None}
    config |= {"model_type": "mtp_head", "num_hidden_layers": 1, "quantization": {"group_size": 64, "bits": 8}}
    config["draft_vocabulary"] = data.tokens.tolist()
    (target / "config.json").write_text(json.dumps(config) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["write", "train"])
    parser.add_argument("source")
    parser.add_argument("target", type=Path)
    parser.add_argument("--tokens", type=int, default=200_000)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--span", type=float, nargs=2, default=(0.0, 1.0), help="the part of the training to do now, such as 0 0.5")
    given = parser.parse_args()
    if given.stage == "write":
        write(given.source, given.target, given.tokens)
    else:
        train(Path(given.source), given.target, given.minutes, tuple(given.span))


if __name__ == "__main__":
    main()
