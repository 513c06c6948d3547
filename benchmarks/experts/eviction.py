"""Hit rates of policies of eviction on drawn routes, compared to the best that is possible with knowledge of the future."""

from __future__ import annotations

from itertools import islice

import click
import numpy as np

from mlxinfer.expert_offload.scores import HALF_LIFE, ExpertScores

from .traces import TRACES

HALF_LIVES = (0.02, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 512.0, float("inf"))
"""From the last use only (LRU) to counts of all uses (LFU)."""
_NEVER = 1 << 60


def lrfu_hits(trace: list[np.ndarray], experts: int, slots: int, half_life: float) -> tuple[int, int]:
    """Simulate a pool of `slots` with `ExpertScores`. Returns (hits, chosen experts) after the first quarter of the trace."""
    scores = ExpertScores(experts, half_life)
    resident = np.zeros(experts, bool)
    hits = total = 0
    for index, chosen in enumerate(trace):
        needed = np.unique(chosen)
        if 4 * index >= len(trace) and len(chosen) == 1:
            hits, total = hits + int(resident[needed].sum()), total + len(needed)
        scores.add(chosen, needed)
        _bring(resident, needed, slots, scores.values)
    return hits, total


def best_hits(trace: list[np.ndarray], experts: int, slots: int) -> tuple[int, int]:
    """Simulate eviction of the expert whose next use is last (Belady, "A study of replacement algorithms", 1966)."""
    next_use = np.full((len(trace), experts), _NEVER)
    for index in range(len(trace) - 2, -1, -1):
        next_use[index] = next_use[index + 1]
        next_use[index][np.unique(trace[index + 1])] = index + 1
    resident = np.zeros(experts, bool)
    hits = total = 0
    for index, chosen in enumerate(trace):
        needed = np.unique(chosen)
        if 4 * index >= len(trace) and len(chosen) == 1:
            hits, total = hits + int(resident[needed].sum()), total + len(needed)
        _bring(resident, needed, slots, -next_use[index])
    return hits, total


def _bring(resident: np.ndarray, needed: np.ndarray, slots: int, values: np.ndarray) -> None:
    """Make `needed` resident, at most `slots` in all: those with the highest values stay."""
    wanted = resident.copy()
    wanted[needed] = True
    if wanted.sum() > slots:
        keys = np.where(wanted, values.astype(float), -np.inf)
        if len(needed) <= slots:
            keys[needed] = np.inf
        wanted[:] = False
        wanted[np.argsort(-keys, kind="stable")[:slots]] = True
    resident[:] = wanted


@click.command("expert-eviction")
@click.option("--experts", default=128, show_default=True)
@click.option("--chosen", default=8, show_default=True, help="Experts of a token.")
@click.option("--tokens", default=2000, show_default=True)
@click.option("--shares", default="0.7,0.5,0.3,0.15", show_default=True, help="Shares of the experts that are resident.")
def eviction(experts: int, chosen: int, tokens: int, shares: str) -> None:
    """Print hit rates of policies of eviction on drawn routes."""
    print(f"{experts} experts, {chosen} of a token, {tokens} steps; a pool uses a half-life of {HALF_LIFE:g} tokens\n")
    names = ["LRU", *(f"{each:g}" for each in HALF_LIVES[1:-1]), "LFU", "best"]
    print("| routes | resident | " + " | ".join(names) + " |\n" + "| --- " * (len(names) + 2) + "|")
    for name, draw in TRACES.items():
        trace = list(islice(draw(np.random.default_rng(0), experts, chosen), tokens))
        for share in map(float, shares.split(",")):
            slots = max(int(share * experts), chosen)
            found = [lrfu_hits(trace, experts, slots, each) for each in HALF_LIVES] + [best_hits(trace, experts, slots)]
            print(f"| {name} | {share:.0%} | " + " | ".join(f"{100 * hits / total:.1f}" for hits, total in found) + " |")
