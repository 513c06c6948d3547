"""What a head that drafts brings: `python -m benchmarks.heads MODEL HEAD` answers the same prompts with and without it, in turns, at 1 to 8
streams, and writes results/heads.json (every pair) and results/heads.md (medians): tokens per second of wall time and of processor time,
their ratios, and how many drafts held. Free text: n-gram drafts are off in both. What a head costs where it is no good is told by a high
temperature, and by a head of the same form whose matrices are random."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import mlx.core as mx
import numpy as np

from mlxinfer import LLM, SamplingParams

from .batch.texts import STORIES
from .options import RESULTS
from .system import describe

STREAMS, PAIRS, TOKENS = (1, 2, 4, 8), 6, 96
ASKED = (
    "Write a story about a clockmaker and her apprentice.",
    "What should I think of before I adopt a cat?",
    "Explain how a bridge carries a load.",
    "Write a letter to the mayor about the park.",
    "Compare trains and buses.",
    *STORIES[1:],
)
HEADER = "text | streams | tokens/s without | with | ratio, wall | ratio, processor time | drafts that held | tokens a step | same answers"


def answered(llm: LLM, streams: int, temperature: float, seed: int) -> tuple[float, float, int]:
    """Tokens per second of wall time and per second of processor time of one batch, and a number that stands for its tokens."""
    prompts = [llm.chat_prompt([{"role": "user", "content": ASKED[(seed + i) % len(ASKED)]}]) for i in range(streams)]
    params = [SamplingParams(temperature=temperature, max_tokens=TOKENS, seed=seed + i, ignore_eos=True) for i in range(streams)]
    wall, cpu = perf_counter(), process_time()
    found = llm.generate(prompts, params)
    wall, cpu = perf_counter() - wall, process_time() - cpu
    count = sum(len(one.token_ids) for one in found)
    return count / wall, count / cpu, hash(tuple(tuple(one.token_ids) for one in found))


def measure(plain: LLM, drafting: LLM, text: str, streams: int, temperature: float) -> dict[str, Any]:
    """All pairs of one line of the table."""
    for llm in (plain, drafting):
        answered(llm, streams, temperature, 900)
    before, pairs = drafting.stats(), []
    for seed in range(PAIRS):
        turn = (plain, drafting) if seed % 2 else (drafting, plain)
        found = {llm: answered(llm, streams, temperature, seed) for llm in turn}
        pairs.append((found[plain], found[drafting]))
    after = drafting.stats()
    names = ("drafted_tokens", "accepted_tokens", "steps")
    counts = {name: getattr(after, name) - getattr(before, name) for name in names}
    rates = [{"without": without[:2], "with": with_[:2], "same": without[2] == with_[2]} for without, with_ in pairs]
    return {"text": text, "temperature": temperature, "streams": streams, "pairs": rates, **counts}


def line(case: dict[str, Any]) -> str:
    pairs, drafted = case["pairs"], case["drafted_tokens"]
    wall, cpu = (statistics.median(pair["with"][i] / pair["without"][i] for pair in pairs) for i in (0, 1))
    rates = [statistics.median(pair[key][0] for pair in pairs) for key in ("without", "with")]
    share = f"{case['accepted_tokens'] / drafted:.2f} of {drafted}" if drafted else "none drafted"
    each = len(pairs) * TOKENS / case["steps"]
    same = f"{sum(pair['same'] for pair in pairs)} of {len(pairs)}"
    cells = (case["text"], case["streams"], f"{rates[0]:.0f}", f"{rates[1]:.0f}", f"{wall:.2f}", f"{cpu:.2f}", share, f"{each:.2f}", same)
    return "| " + " | ".join(map(str, cells)) + " |"


def random_head(head: Path, folder: Path) -> Path:
    """A head of the same form that knows nothing: every matrix has random codes."""
    random, tensors = np.random.default_rng(0), dict(mx.load(str(head / "model.safetensors")))
    for name, value in tensors.items():
        if value.dtype == mx.uint32:
            tensors[name] = mx.array(random.integers(0, 2**32, value.shape, np.uint32))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    (folder / "config.json").write_text((head / "config.json").read_text())
    return folder


def cases(model: str, head: Path) -> list[dict[str, Any]]:
    settings: dict[str, Any] = {"max_num_seqs": max(STREAMS), "max_context": 1024, "speculate": False}
    found = []
    with tempfile.TemporaryDirectory() as folder, LLM(model, **settings) as plain:
        texts = (("greedy", head, 0.0), ("temperature 0.7", head, 0.7), ("temperature 1.5", head, 1.5))
        for text, drafts, temperature in (*texts, ("greedy, a random head", random_head(head, Path(folder)), 0.0)):
            with LLM(model, draft=drafts, **settings) as drafting:
                for streams in STREAMS:
                    found.append(measure(plain, drafting, text, streams, temperature))
                    print(line(found[-1]), flush=True)
    return found


def main(model: str, head: str) -> None:
    print(f"| {HEADER} |\n|{' --- |' * HEADER.count('|')} --- |")
    about = describe() | {"model": Path(model).name, "head": Path(head).name, "tokens": TOKENS}
    found = cases(model, Path(head))
    table = [f"| {HEADER} |", f"|{' --- |' * HEADER.count('|')} --- |", *map(line, found)]
    RESULTS.joinpath("heads.md").write_text("\n".join(table) + "\n", encoding="utf-8")
    RESULTS.joinpath("heads.json").write_text(json.dumps(about | {"cases": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m benchmarks.heads MODEL HEAD")
    main(*sys.argv[1:])
