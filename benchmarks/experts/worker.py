"""One engine with a model of `models.py`, in a process of its own.

{"do": "load", "model": ..., "threads": 2, "share": 0.5}             -> {"seconds": ...}
{"do": "decode", "first": 1024, "warm": 16, "steps": 32}             -> {"seconds": ..., "bytes": ..., "right": 1.0}
{"do": "prefill", "first": 1024, "tokens": 512}                      -> {"seconds": ..., "bytes": ...}
{"do": "memory"}                                                     -> {"rss": ..., "peak_rss": ..., "swap": ...}
"""

from __future__ import annotations

import sys
from pathlib import Path
from time import perf_counter
from typing import Any

from ..common.worker import main
from .models import RANGE

JOBS = ("load", "decode", "prefill", "memory")
CONTEXT = 1024
Answer = dict[str, Any]


def walk(first: int, start: int, count: int) -> list[int]:
    """`count` tokens of the range that begins with `first`, from the token number `start` on."""
    return [first + (start + i) % RANGE for i in range(count)]


def read_bytes() -> int | None:
    """Bytes that this process had the disk read, for page faults too; None where the system does not report it."""
    try:
        lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


class Subject:
    """An engine that walks through the vocabulary. Every walk starts where the one before ended."""

    def __init__(self) -> None:
        self._at: dict[int, int] = {}

    def load(self, model: str, threads: int, share: float) -> Answer:
        """Load the model, with this share of its experts in memory if the engine decides that."""
        raise NotImplementedError

    def tokens(self, prompt: list[int], count: int) -> list[tuple[int, float]]:
        """Return the greedy tokens after a prompt, each with the time at which it was there."""
        raise NotImplementedError

    def counts(self) -> Answer:
        """Counts of an engine since it was loaded: `hits` and `misses` of experts, `waiting` seconds."""
        return {}

    def decode(self, first: int, warm: int, steps: int) -> Answer:
        """Time `steps` tokens after `warm` others."""
        start = self._at.get(first, 0)
        self._at[first] = start + warm + steps + 1
        ready = self.tokens(walk(first, start, 1), warm + 1)
        before, counted = read_bytes(), self.counts()
        done = self.tokens(walk(first, start + len(ready), 1), steps + 1)
        after, counts = read_bytes(), self.counts()
        expected = walk(first, start + 1, len(ready)) + walk(first, start + len(ready) + 1, len(done))
        right = sum(got[0] == wanted for got, wanted in zip([*ready, *done], expected, strict=True)) / len(expected)
        found = {"seconds": done[-1][1] - done[0][1], "steps": steps, "right": right}
        found |= {name: counts[name] - counted[name] for name in counts}
        return found | ({} if before is None or after is None else {"bytes": (after - before) * steps / (steps + 1)})

    def prefill(self, first: int, tokens: int) -> Answer:
        """Time a prompt, up to the first token of its answer."""
        start = self._at.get(first, 0)
        self._at[first] = start + tokens
        before, begun = read_bytes(), perf_counter()
        done = self.tokens(walk(first, start, tokens), 1)
        after = read_bytes()
        found = {"seconds": done[0][1] - begun, "tokens": tokens}
        return found | ({} if before is None or after is None else {"bytes": after - before})

    def memory(self) -> Answer:
        values = {}
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            name, _, rest = line.partition(":")
            if name in ("VmRSS", "VmHWM", "VmSwap", "RssFile"):
                values[name] = int(rest.split()[0]) * 1024
        return {"rss": values["VmRSS"], "peak_rss": values["VmHWM"], "swap": values.get("VmSwap", 0), "file_rss": values.get("RssFile", 0)}


class Ours(Subject):
    def load(self, model: str, threads: int, share: float) -> Answer:
        from mlxinfer import LLM
        from mlxinfer.loading.load import meta_model

        wanted = sum(layer.nbytes for layer in meta_model(model).expert_layers) * share
        begun = perf_counter()
        settings: Any = {"experts_memory": wanted / 1e9, "max_num_seqs": 1, "max_context": CONTEXT, "kv": "16"}
        self._llm = LLM(model, speculate=False, prefix_cache=False, **settings)
        plan = self._llm.plan
        pools = plan.experts.pools if plan.experts else int(wanted)
        return {"seconds": perf_counter() - begun, "planned": plan.used, "pools": pools, "rows": plan.rows}

    def tokens(self, prompt: list[int], count: int) -> list[tuple[int, float]]:
        from mlxinfer import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        return [(token, perf_counter()) for chunk in self._llm.stream(prompt, params) for token in chunk.token_ids]

    def counts(self) -> Answer:
        stats = self._llm.stats()
        return {"hits": stats.expert_hits, "misses": stats.expert_misses, "waiting": stats.expert_wait_s}


def create(engine: str) -> Subject:
    if engine == "llama.cpp":
        from .mapped_llama_cpp import MappedLlamaCpp

        return MappedLlamaCpp()
    return Ours()


if __name__ == "__main__":
    main(create, JOBS)
    sys.exit(0)
