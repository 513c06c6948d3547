"""Train a head that drafts for a model of the Llama family, on text that the model writes itself: one more layer, which reads the model's
hidden rows and the next token, and predicts the token after it. The embedding and the output matrix are the model's own.

    python examples/train_mtp_head.py MODEL HEAD       MODEL: a Hugging Face directory, or a GGUF file; HEAD: a new directory

It needs torch and transformers (and accelerate, for GGUF files), takes a GPU where there is one, and goes on with the texts that were
written when it was stopped. After that, `mlxinfer run MODEL --draft HEAD`. Options: --texts N, --writing N (minutes at most), --minutes N
(of training), --turns N (tokens drafted one after another), --vocabulary N (tokens it can propose), --bits 4 or 8 (of the head's matrices),
--dtype bfloat16 (twice as fast on processors that multiply such numbers, and the default on a GPU).
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch.nn.functional import linear, log_softmax, rms_norm, scaled_dot_product_attention, silu
from transformers import AutoModelForCausalLM, AutoTokenizer, StaticCache

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
BLANK = "\0"
"""Stands for the user's message that the model writes itself."""
MOST, QUESTION = 288, 40
"""Tokens of a text, and of a message that the model writes as its own user."""
TEMPERATURES = (0.0, 0.0, 0.6, 1.0)
RATE, BATCH, STREAMS, LENGTHS, HELD = 8e-4, 64, 2048, 10, 256
"""Peak learning rate, texts of a step, texts written together, different lengths of their beginnings, and texts that only measure, at
most half of all."""
WEIGHTS = (1.0, 0.8, 0.6, 0.5)
"""Of the loss of the first, second and further tokens drafted."""


class Teacher:
    """The model: what its text and its hidden rows are."""

    def __init__(self, path: Path, device: str, dtype: torch.dtype) -> None:
        place = {"gguf_file": path.name} if path.is_file() else {}
        folder = path.parent if path.is_file() else path
        self.device, self.tokenizer = device, AutoTokenizer.from_pretrained(folder, **place)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **place).to(device).eval()
        self.config = self.model.config.to_dict()
        self.output: torch.Tensor = self.model.lm_head.weight.detach()
        ends = self.model.generation_config.eos_token_id or self.tokenizer.eos_token_id
        self.ends = torch.tensor(sorted({*(ends if isinstance(ends, list) else [ends]), self.tokenizer.eos_token_id}), device=device)

    @torch.no_grad()
    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Hidden rows after the last norm, `[B, L, hidden]`."""
        return self.model.model(input_ids=ids, use_cache=False).last_hidden_state

    @torch.no_grad()
    def write(self, starts: list[list[int]], then: list[list[int]], temperatures: torch.Tensor) -> torch.Tensor:
        """`[B, MOST]` tokens that begin with `starts`, which have one length; -1 after the end. Where `then` is not empty, the first end
        closes the user's message, written at temperature 1 (or `QUESTION` tokens do), and `then` follows."""
        count, before = len(starts), len(starts[0])
        ids = torch.full((count, MOST), -1, device=self.device)
        ids[:, :before] = torch.tensor(starts, device=self.device)
        width = max(map(len, then)) + 1
        forced = torch.tensor([part + [-1] * (width - len(part)) for part in then], device=self.device)
        at = torch.tensor([-1 if part else width - 1 for part in then], device=self.device)
        done = torch.zeros(count, dtype=torch.bool, device=self.device)
        cache = StaticCache(config=self.model.config, max_cache_len=MOST)
        step = ids[:, :before]
        for position in range(before, MOST):
            where = torch.arange(position - step.shape[1], position, device=self.device)
            found = self.model.model(input_ids=step, past_key_values=cache, cache_position=where, position_ids=where[None])
            heat = torch.where(at < 0, 1.0, temperatures)
            token = sampled(linear(found.last_hidden_state[:, -1], self.output).float(), heat)
            asking = (at < 0) & (torch.isin(token, self.ends) | (position - before >= QUESTION))
            at = torch.where(asking, 0, at)
            given = forced.gather(1, at.clamp_min(0)[:, None])[:, 0]
            given = torch.where(at < 0, -1, given)
            token = torch.where(given >= 0, given, token)
            at = torch.where(given >= 0, at + 1, at)
            ids[:, position] = torch.where(done, -1, token)
            done |= (at >= 0) & (given < 0) & torch.isin(token, self.ends)
            step = token[:, None]
            if position % 16 == 0 and done.all():
                break
        return ids


def sampled(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """A token for each row; the likeliest where the temperature is 0."""
    noise = -torch.empty_like(logits).exponential_().log()
    return (logits / temperatures.clamp_min(1e-6)[:, None] + noise * (temperatures > 0)[:, None]).argmax(-1)


def starts(teacher: Teacher, count: int) -> list[tuple[list[int], list[int]]]:
    """How `count` texts begin, and what follows the user's message where the model writes that too: chat messages from the lists above,
    for the most part messages of the model's own, and other text."""
    encode = lambda text: list(teacher.tokenizer(text, add_special_tokens=False)["input_ids"])  # noqa: E731
    chat = lambda text: teacher.tokenizer.apply_chat_template(  # noqa: E731
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )
    asked = [(encode(chat(form.format(topic))), []) for form, topic in itertools.product(REQUESTS, TOPICS)]
    other = [(encode(form.format(topic)), []) for form, topic in itertools.product(BEGINNINGS, TOPICS)]
    before, after = chat(BLANK).split(BLANK)
    own = [(encode(before), encode(after))]
    nothing = [([int(teacher.tokenizer.bos_token_id or teacher.ends[0])], [])]
    random = np.random.default_rng(0)
    kinds = random.choice(4, count, p=(0.25, 0.05, 0.6, 0.1))
    return [(asked, other, own, nothing)[kind][random.integers(len((asked, other, own, nothing)[kind]))] for kind in kinds]


def write(teacher: Teacher, count: int, minutes: float, folder: Path) -> torch.Tensor:
    """`[N, MOST]` tokens of about `count` texts, or as many as are written in this time, -1 after their ends; kept in `folder`, where those
    of an earlier run are found."""
    kept = folder / "texts.npy"
    if kept.exists():
        return torch.from_numpy(np.load(kept).astype(np.int64))
    torch.manual_seed(0)
    by_length: dict[int, list[tuple[list[int], list[int]]]] = {}
    for start in starts(teacher, count):
        by_length.setdefault(len(start[0]), []).append(start)
    batches = [alike[i : i + STREAMS] for alike in sorted(by_length.values(), key=len)[-LENGTHS:] for i in range(0, len(alike), STREAMS)]
    parts, began = [], time.monotonic()
    for number in torch.randperm(len(batches)).tolist():
        if parts and time.monotonic() - began > 60 * minutes:
            break
        some = batches[number]
        temperatures = torch.tensor([1.0 if len(start) == 1 else TEMPERATURES[n % 4] for n, (start, _) in enumerate(some)])
        parts.append(teacher.write([s for s, _ in some], [t for _, t in some], temperatures.to(teacher.device)).cpu())
        ids = torch.cat(parts)
        ids = ids[torch.randperm(len(ids))]
        np.save(kept, ids.numpy().astype(np.int32))
        print(f"{int((ids >= 0).sum())} tokens, {time.monotonic() - began:.0f} s", flush=True)
    return ids


class Head(torch.nn.Module):
    """The parameters, by their names in the head's file."""

    def __init__(self, config: dict[str, Any], tokens: torch.Tensor) -> None:
        super().__init__()
        hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
        self.eps, self.heads, self.kv = config["rms_norm_eps"], heads, config["num_key_value_heads"]
        self.dim = config.get("head_dim") or hidden // heads
        theta = (config.get("rope_parameters") or config).get("rope_theta", 10000.0)
        angles = torch.arange(MOST)[:, None] / theta ** (torch.arange(0, self.dim, 2) / self.dim)
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

    def start(self, embedded: torch.Tensor, rows: torch.Tensor) -> None:
        """Begin with what predicts the next hidden row best from a token and the row before it, without a layer. Both `[N, hidden]`; the
        row is that of the token before."""
        both = torch.cat([rms_norm(x.float(), x.shape[-1:]) for x in (embedded[1:], rows[:-1])], -1)
        scale = rows.float().pow(2).mean(0).sqrt()
        weights = torch.linalg.solve(both.T @ both + 10 * torch.eye(both.shape[1], device=both.device), both.T @ (rows[1:] / scale).float())
        with torch.no_grad():
            self.weights["mtp/fc"][:] = weights.T
            self.weights["mtp/norm"][:] = scale

    def forward(self, embedded: torch.Tensor, before: torch.Tensor, past: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """A turn over all positions `[B, L, hidden]`: position p sees rows of the first turn up to p - n, after n earlier turns, and one
        row of each later turn. The same as `mlxinfer/models/llama_head.py`."""
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
        a, b = x.chunk(2, -1)
        cos, sin = self.turns[:, : x.shape[1]]
        return (x * cos + torch.cat([-b, a], -1) * sin).to(x.dtype)

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


class Known:
    """What the model makes of texts, computed once: every turn of the training reads it."""

    def __init__(self, teacher: Teacher, ids: torch.Tensor, tokens: torch.Tensor) -> None:
        """`ids` `[N, L]`; `tokens` are the head's vocabulary."""
        self.ids, self.table = ids, teacher.model.get_input_embeddings().weight.detach()
        self.output = teacher.output[tokens]
        number = torch.full((len(teacher.output),), -1, device=ids.device)
        number[tokens] = torch.arange(len(tokens), device=ids.device)
        shape = (len(ids), ids.shape[1] - 1)
        self.rows = torch.zeros(*shape, self.table.shape[1], dtype=self.table.dtype, device=ids.device)
        self.likeliest = torch.full(shape, -1, device=ids.device)
        self.total = torch.zeros(shape, device=ids.device)
        for first in range(0, len(ids), 16):
            part = slice(first, first + 16)
            there = ids[part, 1:] >= 0
            self.rows[part] = teacher.rows(ids[part].clamp_min(0))[:, :-1]
            logits = linear(self.rows[part][there], teacher.output).float()
            self.likeliest[part][there] = number[logits.argmax(-1)]
            self.total[part][there] = logits.logsumexp(-1)

    def losses(self, head: Head, texts: slice, turns: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """For the first, second and further tokens drafted: the cross entropy with the model's own probabilities, as far as they are in the
        head's vocabulary, and how often its likeliest token is the model's."""
        there, rows, likeliest = self.ids[texts, 1:] >= 0, self.rows[texts], self.likeliest[texts]
        embedded = self.table[self.ids[texts, :-1].clamp_min(0)]
        with torch.no_grad():
            wanted = (linear(rows[there], self.output).float() - self.total[texts][there][:, None]).exp()
        place = torch.full(there.shape, -1, device=there.device)
        place[there] = torch.arange(len(wanted), device=there.device)
        before, past, found = shifted(rows, 1), [], []
        for turn in range(turns):
            y = head(embedded, before, past)
            ahead = there[:, turn:]
            logits = linear(y[:, turn:][ahead], self.output).float()
            loss = -(wanted[place[:, turn:][ahead]] * log_softmax(logits, -1)).sum(-1).mean()
            found.append((loss, (logits.argmax(-1) == likeliest[:, turn:][ahead]).float().mean()))
            before = shifted(y, 1)
        return found


def train(teacher: Teacher, ids: torch.Tensor, target: Path, minutes: float, turns: int, vocabulary: int, bits: int) -> None:
    """AdamW on batches of whole texts; the head's own rows are fed back for every token after the first, as they are when it drafts."""
    torch.manual_seed(0)
    counts = torch.bincount(ids[ids >= 0], minlength=len(teacher.output))
    tokens = counts.argsort(descending=True)[:vocabulary].sort().values
    print(f"{vocabulary} tokens are {counts[tokens].sum() / counts.sum():.4f} of all", flush=True)
    if len(ids) < 2:
        raise SystemExit("one text is too few to train a head and to measure it: give more --texts, or more minutes of --writing")
    aside = min(HELD, len(ids) // 2)
    held, rest = (Known(teacher, part.to(teacher.device), tokens.to(teacher.device)) for part in (ids[:aside], ids[aside:]))
    head = Head(teacher.config, tokens).to(teacher.device)
    with torch.no_grad():
        some = rest.ids[:BATCH, :-1].clamp_min(0)
        head.start(rest.table[some].flatten(0, 1), rest.rows[:BATCH].flatten(0, 1))
    optimizer = torch.optim.AdamW(head.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    began, told, step, batch = time.monotonic(), 0.0, 0, min(BATCH, len(rest.ids))
    batches = max(len(rest.ids) // batch, 1)
    order = torch.arange(batches)
    while (done := (time.monotonic() - began) / (60 * minutes)) < 1:
        if not step % batches:
            order = torch.randperm(batches)
        at = int(order[step % batches]) * batch
        for group in optimizer.param_groups:
            group["lr"] = RATE * min((step + 1) / 100, 1.0) * max((1 + np.cos(np.pi * done)) / 2, 0.01)
        found = rest.losses(head, slice(at, at + batch), turns)
        optimizer.zero_grad()
        sum(weight * loss for weight, (loss, _) in zip(WEIGHTS, found, strict=False)).backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        step += 1
        if time.monotonic() - told > 30:
            told = time.monotonic()
            print(f"step {step}, epoch {step / batches:.2f}, {60 * minutes * done:.0f} s: held", *shares(head, held), flush=True)
            export(head, teacher.config, target, bits)
    export(head, teacher.config, target, bits)
    print(f"step {step}, epoch {step / batches:.2f}: held", *shares(head, held))


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
    ids = write(teacher, given.texts, given.writing, given.head)
    train(teacher, ids, given.head, given.minutes, given.turns, given.vocabulary, given.bits)


if __name__ == "__main__":
    main()
