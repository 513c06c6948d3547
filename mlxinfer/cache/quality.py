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


MEASURED: dict[str, tuple[Loss, ...]] = {
    "8": (Loss("SmolLM2 135M", 3.3e-05, 0.999), Loss("Gemma 3 270M", 2.4e-05, 0.997)),
    "k8v4": (Loss("SmolLM2 135M", 0.0021, 0.979), Loss("Gemma 3 270M", 0.0024, 0.978)),
    "k6v4": (Loss("SmolLM2 135M", 0.0025, 0.974), Loss("Gemma 3 270M", 0.0028, 0.971)),
    "k5v4": (Loss("SmolLM2 135M", 0.0037, 0.971), Loss("Gemma 3 270M", 0.0035, 0.971)),
    "4": (Loss("SmolLM2 135M", 0.008, 0.959), Loss("Gemma 3 270M", 0.0071, 0.961)),
    "3": (Loss("SmolLM2 135M", 0.04, 0.894), Loss("Gemma 3 270M", 0.032, 0.912)),
    "2": (Loss("SmolLM2 135M", 0.39, 0.700), Loss("Gemma 3 270M", 0.23, 0.770)),
}
"""By `KVFormat.name`, over 1024 tokens of text: what `python -m benchmarks kv-quality` measured. Nothing else stands here."""


def loss_line(kv: KVFormat) -> str | None:
    """None for a cache that loses nothing."""
    if not kv.quantized:
        return None
    losses = MEASURED.get(kv.name)
    if not losses:
        return f"the cache is quantized (kv {kv.name}), which loses quality; how much has not been measured for this format"
    shown = "; ".join(f"{loss.model}: KL {loss.kl:.2g}, {loss.top1:.1%} the same top token" for loss in losses)
    return f"the cache is quantized (kv {kv.name}); measured against 16 bits, {shown}"
