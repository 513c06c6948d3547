"""Tokens per second of one model on several Macs, from the latency and bandwidth of what connects them. Computed, not measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mlxinfer.distributed.cost import LINKS, Job, Link, pipeline_tokens_s, tensor_tokens_s

MACS = (2, 3, 4)


def job(macs: int, *, weights: float = 40e9, blocks: int = 80, hidden: int = 8192, bandwidth: float = 546e9) -> Job:
    """A model of so many bytes, in equal parts, on Macs that read so many bytes per second from memory: 70B at 4 bits on M4 Max, if not
    told otherwise."""
    return Job(hidden=hidden, blocks=blocks, row_bytes=2, weights=[weights / macs] * macs, bandwidth=[bandwidth] * macs)


def table(links: Sequence[Link] = LINKS, **model: Any) -> Iterator[str]:
    """Markdown; `model` is what `job` takes."""
    yield "| Macs | link | layers, tok/s | `--split tensor`, tok/s |"
    yield "| --- | --- | --- | --- |"
    for macs in MACS:
        for link in links:
            asked = job(macs, **model)
            yield f"| {macs} | {link.name} | {pipeline_tokens_s(asked, link):.1f} | {tensor_tokens_s(asked, link):.1f} |"
