"""The measurements of `compare`."""

from __future__ import annotations

from dataclasses import dataclass, replace

OURS = "mlxinfer"
ONE_AT_A_TIME = "mlx-lm"
PROMPT = "The capital of France is"


@dataclass(frozen=True, slots=True)
class Work:
    """A row of the results: `tokens` of a prompt, or `steps` of decoding `streams` sequences after `depth` tokens. `kv` is the bits of the
    cache."""

    name: str
    kind: str
    tokens: int = 0
    depth: int = 0
    streams: int = 1
    steps: int = 0
    kv: int = 16

    def job(self) -> dict[str, int]:
        if self.kind == "prefill":
            return {"tokens": self.tokens}
        return {"depth": self.depth, "streams": self.streams, "steps": self.steps, "kv": self.kv}

    def limited(self, most: int | None) -> Work:
        """The same work with at most `most` tokens in a prompt or in the cache.

        A cache whose width is compared keeps its depth, because it is filled without a prompt. It gets fewer steps.
        """
        if most is None:
            return self
        if self.depth == DEEP:
            return replace(self, steps=min(self.steps, max(most // 8, 1)))
        return replace(self, tokens=min(self.tokens, most), depth=min(self.depth, most))

    def suits(self, engine: str) -> bool:
        return self.streams == 1 or engine != ONE_AT_A_TIME


DEEP = 4096
"""Tokens in a cache whose widths are compared."""

START = Work("start", "start", tokens=512, steps=32)
"""A separate process, from its start to the first token. Then a prompt and some decoding, to measure its memory."""

START_NAME, FIRST_NAME, MEMORY_NAME = "load to first token", "first load to first token", "peak memory"
OURS_FIRST = "mlxinfer-first"
"""This project at a first load. Later loads map the file that the first has written. Other engines do the same every time."""


def works(steps: int) -> tuple[Work, ...]:
    return (
        Work("decode at 0", "decode", depth=0, steps=steps),
        Work("decode at 1024", "decode", depth=1024, steps=steps),
        Work("decode at 0, 8 together", "decode", depth=0, streams=8, steps=steps),
        Work("prefill 512", "prefill", tokens=512),
        Work("prefill 2048", "prefill", tokens=2048),
    )


def kv_works(steps: int) -> tuple[Work, ...]:
    """Decoding after a long past, in caches of fewer and fewer bits."""
    return tuple(Work(f"decode at {DEEP}, {bits}-bit cache", "decode", depth=DEEP, steps=steps, kv=bits) for bits in (16, 8, 4))


def context_of(all_works: tuple[Work, ...]) -> int:
    """Tokens of the longest sequence."""
    return max(max(work.tokens, work.depth) + work.steps for work in all_works) + 64
