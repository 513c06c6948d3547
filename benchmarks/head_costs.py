"""What drafts cost: `python -m benchmarks.head_costs MODEL HEAD` prints the time of a step, of steps that verify drafts, and of a draft, of
one sequence with 130 tokens before; and from these how many times as many tokens a second drafts bring, for each chance that a draft is
right. Everything takes turns, so that other work on the machine counts for all alike; processor time is told beside, for which
MLXINFER_THREADS=1 is best. Every step is waited for: what an engine overlaps is not."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from time import perf_counter, process_time

import mlx.core as mx

from mlxinfer import LLM
from mlxinfer.cache.base import Segment
from mlxinfer.cache.paged import PagedCache
from mlxinfer.models.decoder import Model

PAST, MOST, TURNS = 130, 4, 40
CHANCES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)


class Costs:
    """Steps of one sequence, each of which leaves it as it was."""

    def __init__(self, model: Model, cache: PagedCache) -> None:
        self.model, self.cache, self.slot = model, cache, cache.open()
        tokens = [7] * PAST
        step = cache.begin([Segment(self.slot, 0, PAST, 0, PAST)])
        mx.eval(model.hidden(mx.array(tokens, dtype=mx.int32), step), step.state)
        cache.commit(step, {self.slot: tokens})

    def verify(self, drafts: int) -> None:
        """A step of the model with this many drafts, and the likeliest token after each."""
        rows = 1 + drafts
        step = self.cache.begin([Segment(self.slot, 0, rows, PAST, PAST + rows, 0, rows)])
        scores = self.model.scores(self.model.hidden(mx.array([7] * rows, dtype=mx.int32), step))
        mx.eval(mx.argmax(scores, axis=-1), step.state)
        step.close()

    def draft(self, drafts: int) -> None:
        """So many drafts, one after another."""
        assert self.model.mtp is not None
        rows, token = self.cache.states(self.model.mtp.places.state, [self.slot])[:, 0], mx.array([7], dtype=mx.int32)
        for turn in range(drafts):
            step = self.cache.begin([Segment(self.slot, 0, 1, PAST + turn, PAST + turn + 1)])
            rows, scores = self.model.draft(token, rows, step)
            token = scores.at(mx.argmax(scores.logits, axis=-1)).astype(mx.int32)
            mx.async_eval(token, step.state)  # type: ignore[no-untyped-call]
            step.close()
        mx.eval(token)


def seconds(work: Callable[[], None]) -> tuple[float, float]:
    """By the clock, and of processors."""
    clock, processors = perf_counter(), process_time()
    work()
    return perf_counter() - clock, process_time() - processors


def main(model: str, head: str) -> None:
    settings = {"max_num_seqs": 1, "max_context": 1024, "speculate": False}
    with LLM(model, **settings) as plain, LLM(model, draft=head, **settings) as drafting:  # type: ignore[arg-type]
        without, with_ = (Costs(llm.engine.model, llm.engine.cache) for llm in (plain, drafting))
        tried: dict[str, Callable[[], None]] = {"a step without a head": lambda: without.verify(0)}
        for n in range(MOST + 1):
            tried[f"a step with one and {n} drafts"] = lambda n=n: with_.verify(n)  # type: ignore[misc]
        for n in range(1, MOST + 1):
            tried[f"making {n} drafts"] = lambda n=n: with_.draft(n)  # type: ignore[misc]
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in tried}
        for _ in range(TURNS):
            for name, work in tried.items():
                times[name].append(seconds(work))
    found = {name: statistics.median(clock for clock, _ in times[name]) for name in tried}
    plain_step = found["a step without a head"]
    print("| what | ms, median | least | of processor time | in steps |\n| --- | ---: | ---: | ---: | ---: |")
    for name, value in found.items():
        processors = statistics.median(used for _, used in times[name])
        print(f"| {name} | {1000 * value:.2f} | {1000 * min(times[name])[0]:.2f} | {1000 * processors:.2f} | {value / plain_step:.2f} |")
    print("\n| drafts | " + " | ".join(f"{chance} right" for chance in CHANCES) + " |\n|" + " --- |" * (len(CHANCES) + 1))
    for n in range(MOST + 1):
        cost = found[f"a step with one and {n} drafts"] + (found[f"making {n} drafts"] if n else 0.0)
        gains = [sum(chance**i for i in range(n + 1)) * plain_step / cost for chance in CHANCES]
        print(f"| {n} | " + " | ".join(f"{gain:.2f}" for gain in gains) + " |")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m benchmarks.head_costs MODEL HEAD")
    main(*sys.argv[1:])
