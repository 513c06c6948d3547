"""`python -m benchmarks expert-macs`: the rates that the disks of Macs allow, computed from the sizes of published models."""

from __future__ import annotations

from dataclasses import dataclass

import click

from mlxinfer.loading.memory.experts import ExpertDemand, ExpertLayer

from ..common.report import markdown

_OTHER_BYTES = 1.6e9
"""Of the cache, a step and the process, at a context of 8192 tokens."""


@dataclass(frozen=True, slots=True)
class Published:
    """Sizes of a published model."""

    name: str
    layers: int
    """Layers with experts."""
    experts: int
    chosen: int
    weights: int
    """Weights of an expert."""
    bits: float
    """Bits of a weight of an expert, with scales."""
    dense: float
    """Bytes of all other weights."""

    def demand(self) -> ExpertDemand:
        nbytes = int(self.experts * self.weights * self.bits / 8)
        layers = (ExpertLayer(key=str(i), experts=self.experts, chosen=self.chosen, nbytes=nbytes) for i in range(self.layers))
        return ExpertDemand(layers=tuple(layers))


MODELS = (
    Published("Qwen3-30B-A3B, 4 bits", 48, 128, 8, 3 * 2048 * 768, 4.5, 0.9e9),
    Published("gpt-oss-20b", 24, 32, 4, 3 * 2880 * 2880, 4.25, 1.8e9),
    Published("gpt-oss-120b", 36, 128, 4, 3 * 2880 * 2880, 4.25, 2.3e9),
    Published("GLM-4.5-Air, 4 bits", 45, 128, 8, 3 * 4096 * 1408, 4.5, 4.0e9),
    Published("Qwen3-235B-A22B, 4 bits", 94, 128, 8, 3 * 4096 * 1536, 4.5, 4.5e9),
)
MACS = ((16, 11.5, 3), (24, 17.2, 3), (32, 22.9, 5), (48, 38.7, 5), (64, 51.5, 7), (128, 103.1, 7))
"""Memory and recommended working set in GB, and the assumed speed of the SSD in GB/s."""


@click.command("expert-macs")
def expert_macs() -> None:
    """Print the tokens per second that the SSD of a Mac allows for models larger than its memory. Computed, not measured."""
    rows = [["model", "Mac", "experts in memory", "hit rate", "MB read a token", "SSD", "tokens/s at most"]]
    for model in MODELS:
        demand = model.demand()
        for memory, usable, speed in MACS:
            pools = usable * 1e9 - model.dense - _OTHER_BYTES
            if not demand.least <= pools < demand.nbytes:
                continue
            found = demand.pooled(int(pools), int(model.dense))
            nbytes = found.token_bytes()
            rate = speed * 1e9 / nbytes
            share, hits = f"{found.pools / 1e9:.0f} of {demand.nbytes / 1e9:.0f} GB", f"{found.hit_rate():.0%}"
            rows.append([model.name, f"{memory} GB", share, hits, f"{nbytes / 1e6:.0f}", f"{speed} GB/s", f"{rate:.1f}"])
    click.echo(markdown(rows))
