"""Texts that a model of the Llama family writes itself, most of them as its own user, with its hidden rows: what `train_mtp_head.py` trains
a head on."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import linear, scaled_dot_product_attention
from transformers import AutoModelForCausalLM, AutoTokenizer

TOPICS = (
    """
the sea; a lost key; bread; winter mornings; trains; the moon; bees; an old library; friendship; mountains; music; rain; a garden; dreams;
computers; a small town; coffee; the stars; dogs; a storm; volcanoes; bridges; painting; a lighthouse keeper; chess; the desert; time; tea;
a broken clock; rivers; school; honesty; markets; robots; whales; sleep; a bicycle; photosynthesis; gravity; electricity; the Roman Empire;
the French Revolution; democracy; inflation; vaccines; the brain; cells; DNA; atoms; sound; light; earthquakes; dinosaurs; penguins;
recycling; solar power; cooking rice; running; yoga; football; learning a language; public speaking; job interviews; saving money; moving
house; a birthday party; travel to Japan; Paris; camping; photography; poetry; theatre; architecture; mathematics; statistics; algebra;
prime numbers; sorting a list; reading a file in Python; functions; databases; the internet; email; passwords; privacy; video games; toys;
grandparents; neighbours; cats; forests; farms; cheese; chocolate; salt; stress; happiness; courage; a detective; a dragon; a spaceship
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
BLANK = "\0"
"""Stands for the user's message that the model writes itself."""
MOST, QUESTION = 320, 48
"""Tokens of a text, and of a message that the model writes as its own user."""
TEMPERATURES = (0.0, 0.0, 0.0, 0.7)
STREAMS = 2048 if torch.cuda.is_available() else 192
"""Texts written together: each needs the memory of `MOST` keys and values."""


class Teacher:
    """The model: what its text and its hidden rows are. Llama's own arithmetic, as batches of texts of one length need no masks."""

    def __init__(self, path: Path, device: str, dtype: torch.dtype) -> None:
        place = {"gguf_file": path.name} if path.is_file() else {}
        folder = path.parent if path.is_file() else path
        self.device, self.tokenizer = device, AutoTokenizer.from_pretrained(folder, **place)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **place).to(device).eval().requires_grad_(False)
        self.config, self.layers = self.model.config.to_dict(), list(self.model.model.layers)
        self.output: torch.Tensor = self.model.lm_head.weight
        self.kv, self.dim = self.config["num_key_value_heads"], self.layers[0].self_attn.head_dim
        ends = self.model.generation_config.eos_token_id or self.tokenizer.eos_token_id
        self.ends = torch.tensor(sorted({*(ends if isinstance(ends, list) else [ends]), self.tokenizer.eos_token_id}), device=device)

    def room(self, count: int) -> list[torch.Tensor]:
        """Where keys and values of so many texts go, `[2, B, kv, MOST, dim]` for each layer."""
        shape = 2, count, self.kv, MOST, self.dim
        return [torch.empty(shape, dtype=self.output.dtype, device=self.device) for _ in self.layers]

    @torch.no_grad()
    def rows(self, ids: torch.Tensor, past: int, cache: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """The next tokens `[B, n]` of texts to what enters the last layer and what leaves the last norm, `[B, n, hidden]` both. One token
        for each text, or the first ones of all."""
        n, x = ids.shape[1], self.model.model.embed_tokens(ids)
        cos, sin = self.model.model.rotary_emb(x, torch.arange(past, past + n, device=self.device)[None])
        entering = x
        for layer, kept in zip(self.layers, cache, strict=True):
            y, part, entering = layer.input_layernorm(x), layer.self_attn, x
            q, k, v = (each(y).unflatten(-1, (-1, self.dim)).transpose(1, 2) for each in (part.q_proj, part.k_proj, part.v_proj))
            q, kept[0, :, :, past : past + n], kept[1, :, :, past : past + n] = rotated(q, cos, sin), rotated(k, cos, sin), v
            keys, values = kept[..., : past + n, :]
            if n == 1:  # the queries of a KV head are rows that see the same
                y = scaled_dot_product_attention(q.reshape(len(q), self.kv, -1, self.dim), keys, values).reshape(len(q), 1, -1)
            else:
                y = scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)
            x = x + part.o_proj(y)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return entering, self.model.model.norm(x)

    @torch.no_grad()
    def write(self, start: list[int], then: list[list[int]], said: torch.Tensor, temperatures: torch.Tensor) -> dict[str, torch.Tensor]:
        """Texts that begin with `start`: `ids` `[B, MOST]`, -1 after the end, the `rows` of all tokens but the last `[B, MOST, hidden]`,
        and where the answer begins, `first` `[B]`. `then` follows at once where `said`, or else after a message that the model writes at
        temperature 1, up to the first end or `QUESTION` tokens."""
        count, before = len(then), len(start)
        ids, first = torch.full((count, MOST), -1), torch.full((count,), before)
        kept = torch.zeros(count, MOST, self.output.shape[1], dtype=self.output.dtype)
        width = max(map(len, then)) + 1
        forced = torch.tensor([part + [-1] * (width - len(part)) for part in then], device=self.device)
        at = torch.where(said, 0, -1).to(self.device)
        live, ended, cache = torch.arange(count), torch.zeros(count, dtype=torch.bool), self.room(count)
        step = torch.tensor([start], device=self.device).expand(count, -1)
        ids[:, :before] = step.cpu()
        for position in range(before, MOST):
            rows = self.rows(step, position - step.shape[1], cache)[1]
            kept[live, position - step.shape[1] : position] = rows.cpu()
            token = sampled(linear(rows[:, -1], self.output).float(), torch.where(at < 0, 1.0, temperatures[live].to(self.device)))
            asked = (at < 0) & (torch.isin(token, self.ends) | (position - before >= QUESTION))
            at = torch.where(asked, 0, at)
            given = torch.where(at < 0, -1, forced.gather(1, at.clamp_min(0)[:, None])[:, 0])
            token = torch.where(given >= 0, given, token)
            at = torch.where(given >= 0, at + 1, at)
            answers = ((at >= 0) & (given < 0)).cpu()
            ids[live[~ended], position] = token.cpu()[~ended]
            first[live[~answers]] = position + 1
            ended |= answers & torch.isin(token, self.ends).cpu()
            step = token[:, None]
            if ended.float().mean() > 0.15:  # go on with the others, unless they are few
                rest = (~ended).nonzero()[:, 0]
                if len(rest) < 0.1 * count:
                    break
                here = rest.to(self.device)
                live, ended, at, forced, step = live[rest], ended[rest], at[here], forced[here], step[here]
                cache = [each[:, here] for each in cache]
        return {"ids": ids, "rows": kept, "first": first, "temperatures": temperatures}


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`[..., dim]`, its halves turned by these angles."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def sampled(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """A token for each row: the likeliest where the temperature is 0, otherwise one of the 256 likeliest."""
    token, hot = logits.argmax(-1), temperatures > 0
    if hot.any():
        top, ids = logits[hot].topk(min(256, logits.shape[-1]), -1)
        chosen = torch.multinomial((top / temperatures[hot][:, None]).softmax(-1), 1)
        token[hot] = ids.gather(1, chosen)[:, 0]
    return token


def chats(teacher: Teacher, count: int) -> tuple[list[int], list[tuple[list[int], bool]]]:
    """How all chats begin, and how `count` of them go on up to the answer: with a message from the lists above, or, twice as often, with
    what follows a message that the model writes itself (False)."""
    encode = lambda text: list(teacher.tokenizer(text, add_special_tokens=False)["input_ids"])  # noqa: E731
    message = [{"role": "user", "content": BLANK}]
    before, after = teacher.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True).split(BLANK)
    asked = [(encode(form.format(topic) + after), True) for form, topic in itertools.product(REQUESTS, TOPICS)]
    random = np.random.default_rng(0)
    chosen = [(encode(after), False) if random.random() < 2 / 3 else asked[random.integers(len(asked))] for _ in range(count)]
    return encode(before), chosen


def write(teacher: Teacher, count: int, minutes: float, folder: Path) -> dict[str, torch.Tensor]:
    """About `count` texts (`Teacher.write`), or as many as are written in this time; kept in `folder`, where those of an earlier run are
    found."""
    torch.manual_seed(0)
    before, then = chats(teacher, count)
    began, tokens, parts = time.monotonic(), 0, []
    for first in range(0, count, STREAMS):
        kept = folder / f"texts-{first:06d}.pt"
        if not kept.exists() and parts and time.monotonic() - began > 60 * minutes:
            break
        if not kept.exists():
            some = then[first : first + STREAMS]
            temperatures = torch.tensor([TEMPERATURES[n % len(TEMPERATURES)] for n in range(len(some))])
            said = torch.tensor([said for _, said in some])
            torch.save(teacher.write(before, [part for part, _ in some], said, temperatures), kept)
        parts.append(torch.load(kept))
        tokens += int((parts[-1]["ids"] >= 0).sum())
        print(f"{tokens} tokens, {time.monotonic() - began:.0f} s", flush=True)
    order = torch.randperm(sum(len(part["ids"]) for part in parts))
    return {key: torch.cat([part[key] for part in parts])[order] for key in parts[0]}
