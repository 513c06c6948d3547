"""What a quantized cache costs, as it was measured: the table of docs/kv-cache.md, for the line that is printed where one is used."""

from __future__ import annotations

from dataclasses import dataclass

from .format import KVFormat


@dataclass(frozen=True, slots=True)
class Loss:
    """Against the same model with a cache at 16 bits: mean KL divergence of the next token, and how often its likeliest is the same."""

    model: str
    kl: float
    top1: float


MEASURED: dict[str, tuple[Loss, ...]] = {}
"""By `KVFormat.name`. Only what benchmarks measured on real text stands here."""


def loss_line(kv: KVFormat) -> str | None:
    """None for a cache that loses nothing."""
    if not kv.quantized:
        return None
    losses = MEASURED.get(kv.name)
    if not losses:
        return f"the cache is quantized (kv {kv.name}), which loses quality; how much has not been measured for this format"
    shown = "; ".join(f"{loss.model}: KL {loss.kl:.2g}, {loss.top1:.1%} the same top token" for loss in losses)
    return f"the cache is quantized (kv {kv.name}); measured against 16 bits, {shown}"
