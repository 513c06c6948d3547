"""The effect of a head that drafts: `python -m benchmarks.heads MODEL HEAD`.

Answers the same prompts with the head and without, alternating, at 1 to 8 streams. Writes results/requests/heads.json (every pair) and
heads.md (medians): tokens per second of wall time and of processor time, their ratios, and the share of accepted drafts. N-gram drafts are
off in both.

A high temperature, and a head of the same form with random matrices, show the cost of a head whose drafts are wrong. The same model opened
twice in a process can differ by some per cent. So each head is measured between two models without one. Their mean is the time without a
head, and their ratio is in the table too.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from itertools import product
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import mlx.core as mx
import numpy as np

from mlxinfer import LLM, SamplingParams

from .batch.texts import STORIES
from .common.options import RESULTS
from .common.system import describe

STREAMS, ROUNDS, TOKENS = (1, 2, 4, 8), 4, 96
ASKED = (
    "Write a story about a clockmaker and her apprentice.",
    "What should I think of before I adopt a cat?",
    "Explain how a bridge carries a load.",
    "Write a letter to the mayor about the park.",
    "Compare trains and buses.",
    *STORIES[1:],
)
COLUMNS = (
    *("text", "streams", "tokens/s without", "with", "ratio, wall", "ratio, processor time", "second without / first"),
    *("drafts that held", "tokens a step", "same answers"),
)
HEADER = f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}"


def answered(llm: LLM, streams: int, temperature: float, seed: int) -> tuple[float, float, int]:
    """Tokens per second of wall time and per second of processor time of one batch, and a number that stands for its tokens."""
    prompts = [llm.chat_prompt([{"role": "user", "content": ASKED[(seed + i) % len(ASKED)]}]) for i in range(streams)]
    params = [SamplingParams(temperature=temperature, max_tokens=TOKENS, seed=seed + i, ignore_eos=True) for i in range(streams)]
    wall, cpu = perf_counter(), process_time()
    found = llm.generate(prompts, params)
    wall, cpu = perf_counter() - wall, process_time() - cpu
    count = sum(len(one.token_ids) for one in found)
    return count / wall, count / cpu, hash(tuple(tuple(one.token_ids) for one in found))


def measure(llms: list[LLM], text: str, streams: int, temperature: float) -> dict[str, Any]:
    """All rounds of one line of the table; the second of the models has the head."""
    for llm in llms:
        answered(llm, streams, temperature, 900)
    before, rounds = llms[1].stats(), []
    for seed in range(ROUNDS):
        order = llms if seed % 2 else llms[::-1]
        found = {llm: answered(llm, streams, temperature, seed) for llm in order}
        rounds.append([found[llm] for llm in llms])
    after = llms[1].stats()
    counts = {name: getattr(after, name) - getattr(before, name) for name in ("drafted_tokens", "accepted_tokens", "steps")}
    same = [first[2] == with_[2] == second[2] for first, with_, second in rounds]
    rates = [[each[:2] for each in round_] for round_ in rounds]
    return {"text": text, "temperature": temperature, "streams": streams, "rates": rates, "same": same, **counts}


def line(case: dict[str, Any]) -> str:
    """Medians of the rounds."""
    drafted, median = case["drafted_tokens"], statistics.median
    without = [[2 / (1 / first[i] + 1 / second[i]) for first, _, second in case["rates"]] for i in (0, 1)]
    with_ = [[round_[1][i] for round_ in case["rates"]] for i in (0, 1)]
    ratios = [median(a / b for a, b in zip(with_[i], without[i], strict=True)) for i in (0, 1)]
    control = median(second[1] / first[1] for first, _, second in case["rates"])
    share = f"{case['accepted_tokens'] / drafted:.2f} of {drafted}" if drafted else "none drafted"
    numbers = (median(without[0]), median(with_[0])), (*ratios, control)
    cells = [case["text"], case["streams"], *(f"{n:.0f}" for n in numbers[0]), *(f"{n:.2f}" for n in numbers[1]), share]
    cells += [f"{len(with_[0]) * TOKENS / case['steps']:.2f}", f"{sum(case['same'])} of {len(case['same'])}"]
    return f"| {' | '.join(map(str, cells))} |"


def random_head(head: Path, folder: Path) -> Path:
    """A head of the same form that knows nothing: every matrix has random codes."""
    random, tensors = np.random.default_rng(0), dict(mx.load(str(head / "model.safetensors")))  # type: ignore[arg-type]
    for name, value in tensors.items():
        if value.dtype == mx.uint32:
            tensors[name] = mx.array(random.integers(0, 2**32, value.shape, np.uint32))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    (folder / "config.json").write_text((head / "config.json").read_text())
    return folder


def cases(model: str, head: Path) -> list[dict[str, Any]]:
    """All lines, each printed when it is there."""
    settings: dict[str, Any] = {"max_num_seqs": max(STREAMS), "max_context": 1024, "speculate": False}
    texts = (("greedy", 0.0), ("temperature 0.7", 0.7), ("temperature 1.5", 1.5))
    found = []
    with tempfile.TemporaryDirectory() as folder:
        random = random_head(head, Path(folder))
        for drafts, asked in ((head, texts), (random, (("greedy, a random head", 0.0),))):
            with LLM(model, **settings) as first, LLM(model, draft=drafts, **settings) as drafting, LLM(model, **settings) as second:
                for (text, temperature), streams in product(asked, STREAMS):
                    found.append(measure([first, drafting, second], text, streams, temperature))
                    print(line(found[-1]), flush=True)
    return found


def main(model: str, head: str) -> None:
    print(HEADER)
    about = describe() | {"model": Path(model).name, "head": Path(head).name, "tokens": TOKENS}
    found = cases(model, Path(head))
    RESULTS.joinpath("requests/heads.md").write_text("\n".join([HEADER, *map(line, found)]) + "\n", encoding="utf-8")
    RESULTS.joinpath("requests/heads.json").write_text(json.dumps(about | {"cases": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m benchmarks.heads MODEL HEAD")
    main(*sys.argv[1:])
