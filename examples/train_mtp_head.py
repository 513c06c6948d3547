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
from pathlib import Path
from typing import Any

import numpy as np

TOPICS = """the sea; a lost key; bread; winter mornings; trains; the moon; bees; an old library; friendship; mountains; music; rain; a garden;
computers; a small town; coffee; dreams; the stars; dogs; birds; a storm; volcanoes; bridges; painting; a lighthouse keeper; chess; the desert;
time; tea; clouds; fire; a broken clock; rivers; school; a letter; glass; honesty; snow; markets; robots; whales; sleep; a bicycle; photosynthesis;
gravity; electricity; the Roman Empire; the French Revolution; democracy; inflation; vaccines; the heart; the brain; cells; DNA; atoms; magnets;
sound; light; earthquakes; dinosaurs; penguins; elephants; recycling; solar power; cooking rice; pasta; running; yoga; football; swimming;
learning a language; public speaking; job interviews; saving money; moving house; a birthday party; travel to Japan; Paris; New York; camping;
photography; poetry; novels; theatre; architecture; mathematics; statistics; probability; algebra; triangles; prime numbers; sorting a list;
reading a file in Python; loops in Python; functions; databases; the internet; email; passwords; privacy; social media; video games; toys;
grandparents; neighbours; cats; horses; forests; farms; soil; cheese; chocolate; apples; salt; sugar; sleep and health; stress; happiness;
kindness; courage; a mystery; a detective; a dragon; a wizard; a spaceship; a time machine; an island; treasure; a king and a queen""".replace(
    "\n", " "
).split("; ")
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
    """Answers to many prompts in batches, and the hidden rows of prompts and answers, as the output matrix gets them."""
    from mlxinfer import LLM, SamplingParams

    folder.mkdir(parents=True, exist_ok=True)
    llm = LLM(model, max_num_seqs=STREAMS, max_context=1024, dtype="bfloat16", speculate=False, prefix_cache=False)
    ids: list[int] = []
    lengths: list[int] = []
    asked = prompts(3 * tokens // MOST)
    rows: list[np.ndarray] = []
    for start in range(0, len(asked), 2 * STREAMS):
        batch = asked[start : start + 2 * STREAMS]
        texts = [llm.chat_prompt([{"role": "user", "content": text}]) if chat else text for text, chat, _ in batch]
        params = [SamplingParams(temperature=t, max_tokens=MOST, seed=start + i) for i, (_, _, t) in enumerate(batch)]
        for text, answer in zip(texts, llm.generate(texts, params), strict=True):
            before = llm.tokenizer.encode(text) if isinstance(text, str) else text.token_ids
            whole = before + list(answer.token_ids)
            ids += whole
            lengths.append(len(whole))
            rows.append(hidden_rows(llm, whole))
        print(f"{len(ids)} tokens", flush=True)
        if len(ids) >= tokens:
            break
    save(llm, folder, ids, lengths, np.concatenate(rows))


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


def save(llm: Any, folder: Path, ids: list[int], lengths: list[int], rows: np.ndarray) -> None:
    """Everything that training needs, as NumPy files."""
    import mlx.core as mx

    model = llm.loaded.model
    table = model.embedding(mx.arange(model.vocab_size))
    np.save(folder / "embedding.npy", np.array(table.astype(mx.float16)))
    np.save(folder / "ids.npy", np.array(ids, np.int32))
    np.save(folder / "lengths.npy", np.array(lengths, np.int32))
    np.save(folder / "rows.npy", rows)
    (folder / "config.json").write_text(json.dumps(llm.loaded.config))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["write", "train"])
    parser.add_argument("source")
    parser.add_argument("target", type=Path)
    parser.add_argument("--tokens", type=int, default=200_000)
    parser.add_argument("--minutes", type=float, default=15.0)
    given = parser.parse_args()
    if given.stage == "write":
        write(given.source, given.target, given.tokens)
    else:
        train(Path(given.source), given.target, given.minutes)


if __name__ == "__main__":
    main()
