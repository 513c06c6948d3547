"""Largest logit error of every architecture against transformers, ours and mlx-lm's, on the same tiny float32 checkpoints.

    python benchmarks/architectures.py            # prints the table of docs/accuracy.md

The checkpoints and transformers' logits are those in tests/golden/arch, written by transformers 5 (tests/golden/make_arch.py).
Our logits go through the engine: prompts in chunks of 64 tokens, the paged cache, and the decode step.
"""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np

from mlxinfer import LLM

GOLDEN = Path(__file__).parent.parent / "tests" / "golden" / "arch"


def ours(folder: Path, ids: list[int]) -> np.ndarray:
    with LLM(folder, dtype="float32") as llm:
        return np.array(llm.logits(ids))


def mlx_lm(folder: Path, ids: list[int]) -> np.ndarray:
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)
    return np.array(model(mx.array([ids]))[0].astype(mx.float32))


def error(run: object, folder: Path) -> str:
    reference = np.load(folder / "reference.npz")
    try:
        logits = run(folder, reference["ids"].tolist())  # type: ignore[operator]
    except Exception as refusal:  # noqa: BLE001  whatever mlx-lm raises is the result
        return f"refuses ({type(refusal).__name__})"
    return f"{np.abs(logits - reference['logits']).max():.1e}"


def main() -> None:
    print("| checkpoint | mlxinfer | mlx-lm |\n|---|---|---|")
    for folder in sorted(GOLDEN.iterdir()):
        print(f"| {folder.name} | {error(ours, folder)} | {error(mlx_lm, folder)} |", flush=True)


if __name__ == "__main__":
    main()
