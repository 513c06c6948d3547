"""Share of right predictions, if the router of the next layer reads the rows before a layer's experts."""

from __future__ import annotations

from pathlib import Path

import click
import numpy as np

from mlxinfer import LLM
from mlxinfer.nn.moe import EXPECTED

_TEXT = Path(__file__).parents[2] / "docs" / "architecture.md"


def _normed(rows: np.ndarray, weight: np.ndarray) -> np.ndarray:
    found: np.ndarray = rows / np.sqrt((rows * rows).mean(-1, keepdims=True) + 1e-6) * weight
    return found


def random_router(rows: np.ndarray, experts: int, rng: np.random.Generator) -> np.ndarray:
    """Draw a router `[experts, hidden]` whose directions are those in which rows `[T, hidden]` differ."""
    drawn = rng.standard_normal((experts, len(rows))) @ (rows - rows.mean(0))
    found: np.ndarray = drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
    return found


def right_by_rank(before: np.ndarray, rows: np.ndarray, router: np.ndarray, chosen: int) -> np.ndarray:
    """Share of predictions from `before` that are right for `rows`, both `[T, hidden]` and normed, by rank `[chosen]`."""
    real, expected = (np.argsort(-(x @ router.T), axis=1, kind="stable")[:, :chosen] for x in (rows, before))
    found: np.ndarray = (expected[:, :, None] == real[:, None, :]).any(-1).mean(0)
    return found


@click.command("expert-predictions")
@click.argument("model")
@click.option("--experts", default=128, show_default=True)
@click.option("--chosen", default=8, show_default=True, help="Experts of a token.")
@click.option("--tokens", default=400, show_default=True)
def expert_predictions(model: str, experts: int, chosen: int, tokens: int) -> None:
    """Print how often the next layer's router is right one layer early, on the rows of a dense MODEL with routers of random directions."""
    with LLM(model, dtype="float32") as llm:
        ids = llm.tokenizer.encode(_TEXT.read_text(encoding="utf-8"))[:tokens]
        trace = llm.trace(ids, what=["residual", "attention_out"])
        blocks, rng = llm.loaded.model.blocks, np.random.default_rng(0)  # type: ignore[attr-defined]
        middle = [np.array(trace["residual"][layer] + trace["attention_out"][layer]) for layer in range(len(blocks))]
        found = []
        for layer in range(1, len(blocks)):
            weight = np.array(blocks[layer].norms.before_mlp.weight)
            before, rows = (_normed(x, weight) for x in (middle[layer - 1], middle[layer]))
            found.append(right_by_rank(before, rows, random_router(rows, experts, rng), chosen))
    ranks = np.mean(found, axis=0)
    share, of = EXPECTED
    few = max(chosen * share // of, 1)
    print(f"{chosen} of {experts} experts, {len(ids)} tokens, {len(found)} layers")
    print(f"right: {ranks.mean():.1%}, of the {few} that are read ahead {ranks[:few].mean():.1%}")
    print("by rank: " + ", ".join(f"{each:.0%}" for each in ranks))
