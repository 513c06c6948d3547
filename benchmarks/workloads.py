"""What is measured, and with which lengths."""

from __future__ import annotations

from dataclasses import dataclass, replace

OURS = "mlxinfer"
ONE_AT_A_TIME = "mlx-lm"
PROMPT = "The capital of France is"


@dataclass(frozen=True, slots=True)
class Work:
    """A row of the results. `tokens` of a prompt, or `depth` and `steps` of decoding `streams` sequences. `kv` are the bits that keys and
    values are kept in."""

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
        """The same with no more than so many tokens in a prompt or in the cache. A cache of a given width is filled without reading a
        prompt where that would take minutes, so its depth stays; there are fewer steps."""
        if most is None:
            return self
        if self.depth == DEEP:
            return replace(self, steps=min(self.steps, max(most // 8, 1)))
        return replace(self, tokens=min(self.tokens, most), depth=min(self.depth, most))

    def suits(self, engine: str) -> bool:
        return self.streams == 1 or engine != ONE_AT_A_TIME


DEEP = 4096
"""Tokens in the cache where its width is compared."""

START = Work("start", "start", tokens=512, steps=32)
"""A process of its own, from its start to the first token; then a prompt and some decoding, for the memory of it."""

START_NAME, FIRST_NAME, MEMORY_NAME = "load to first token", "first load to first token", "peak memory"
OURS_FIRST = "mlxinfer-first"
"""The engine of the first load of ours: later ones map what that one leaves on disk. All others do the same every time."""


def works(steps: int) -> tuple[Work, ...]:
    return (
        Work("decode at 0", "decode", depth=0, steps=steps),
        Work("decode at 1024", "decode", depth=1024, steps=steps),
        Work("decode at 0, 8 together", "decode", depth=0, streams=8, steps=steps),
        Work("prefill 512", "prefill", tokens=512),
        Work("prefill 2048", "prefill", tokens=2048),
    )


def kv_works(steps: int) -> tuple[Work, ...]:
    """Decoding behind a long past, kept in fewer and fewer bits."""
    return tuple(Work(f"decode at {DEEP}, {bits}-bit cache", "decode", depth=DEEP, steps=steps, kv=bits) for bits in (16, 8, 4))


def context_of(all_works: tuple[Work, ...]) -> int:
    """Tokens that a sequence needs room for."""
    return max(max(work.tokens, work.depth) + work.steps for work in all_works) + 64
