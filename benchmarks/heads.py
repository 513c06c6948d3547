"""What a head that drafts brings: `python -m benchmarks.heads MODEL HEAD` answers the same prompts with and without it, in turns, at 1 to 8
streams, and prints tokens per second of wall time and of CPU time, their ratios, and how many drafts held. Free text: n-gram drafts
are off in both."""

from __future__ import annotations

import statistics
import sys
from time import perf_counter, process_time

from mlxinfer import LLM, SamplingParams

from .batch.texts import STORIES

STREAMS, PAIRS, TOKENS = (1, 2, 4, 8), 5, 96
ASKED = (
    "Write a story about a clockmaker and her apprentice.",
    "What should I think of before I adopt a cat?",
    "Explain how a bridge carries a load.",
    "Write a letter to the mayor about the park.",
    "Compare trains and buses.",
    *STORIES[1:],
)


def answered(llm: LLM, streams: int, temperature: float, seed: int) -> tuple[float, float, int]:
    """Tokens per second of wall time and per second of CPU time of one batch, and a number that stands for its tokens."""
    prompts = [llm.chat_prompt([{"role": "user", "content": ASKED[(seed + i) % len(ASKED)]}]) for i in range(streams)]
    params = [SamplingParams(temperature=temperature, max_tokens=TOKENS, seed=seed + i, ignore_eos=True) for i in range(streams)]
    wall, cpu = perf_counter(), process_time()
    found = llm.generate(prompts, params)
    wall, cpu = perf_counter() - wall, process_time() - cpu
    count = sum(len(one.token_ids) for one in found)
    return count / wall, count / cpu, hash(tuple(tuple(one.token_ids) for one in found))


def measure(plain: LLM, drafting: LLM, streams: int, temperature: float) -> str:
    """A line of the table."""
    for llm in (plain, drafting):
        answered(llm, streams, temperature, 900)
    before = drafting.stats()
    pairs = [tuple(answered(llm, streams, temperature, seed) for llm in (plain, drafting)) for seed in range(PAIRS)]
    after = drafting.stats()
    drafted, accepted = after.drafted_tokens - before.drafted_tokens, after.accepted_tokens - before.accepted_tokens
    wall, cpu = (statistics.median(with_[i] / without[i] for without, with_ in pairs) for i in (0, 1))
    rates = [statistics.median(pair[i][0] for pair in pairs) for i in (0, 1)]
    same = sum(without[2] == with_[2] for without, with_ in pairs)
    share = f"{accepted / drafted:.2f} of {drafted}" if drafted else "none drafted"
    return f"| {temperature} | {streams} | {rates[0]:.1f} | {rates[1]:.1f} | {wall:.2f} | {cpu:.2f} | {share} | {same} of {len(pairs)} |"


def main(model: str, head: str) -> None:
    settings = {"max_num_seqs": max(STREAMS), "max_context": 1024, "speculate": False}
    with LLM(model, **settings) as plain, LLM(model, draft=head, **settings) as drafting:  # type: ignore[arg-type]
        print("| temperature | streams | tokens/s without | with | ratio, wall | ratio, CPU | drafts that held | same answers |")
        print("|" + " --- |" * 8)
        for temperature in (0.0, 0.7):
            for streams in STREAMS:
                print(measure(plain, drafting, streams, temperature), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:3])
