"""Compares long greedy answers of this project in several ways of computing: `python -m benchmarks.mac_report.answers MODEL`.

Rounding differs, so two answers may part after some hundred tokens. They must not part from the first one, and none may end in noise.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence

from .running import output_of

_PROMPT = "Tell a long story about a lighthouse."
_LIMIT_S = 600.0
"""Time limit of one answer."""
_SHOWN = 160
"""Characters of the end of an answer that are printed."""

WAYS: dict[str, tuple[dict[str, str], list[str]]] = {
    "kernels": ({}, []),
    "plain MLX": ({"MLXINFER_METAL_KERNELS": "0"}, []),
    "replayed steps": ({"MLXINFER_COMPILED_STEPS": "1"}, []),
    "built steps": ({"MLXINFER_COMPILED_STEPS": "0"}, []),
    "cache of 4 bits": ({}, ["--kv", "4"]),
}
"""Variables and options of each way, of which the first is compared with the others."""


def answer(model: str, tokens: int, way: str) -> str:
    """Return the answer. Raises ValueError with the last line of an error."""
    variables, options = WAYS[way]
    command = [sys.executable, "-m", "mlxinfer", "run", model, _PROMPT, "--temperature", "0", "--max-tokens", str(tokens)]
    return output_of([*command, *options], variables, _LIMIT_S)


def common(one: str, other: str) -> int:
    """Return the number of characters with which both begin."""
    return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code: 1 if a way fails or parts from the first at once."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mac_report.answers")
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=700)
    given = parser.parse_args(arguments)
    texts: dict[str, str] = {}
    failed = []
    for way in WAYS:
        try:
            texts[way] = answer(given.model, given.tokens, way)
        except (ValueError, subprocess.SubprocessError, OSError) as error:
            print(f"{way}: {error}", flush=True)
            failed.append(way)
            continue
        first = next(iter(texts.values()))
        same = common(first, texts[way])
        failed += [way] if same == 0 < len(first) else []
        ends = " ".join(texts[way][-_SHOWN:].split())
        print(f"{way}: {len(texts[way])} characters, the first {same} as by {next(iter(texts))}, ending in: {ends}", flush=True)
    shared = ", ".join(f"{way} {common(next(iter(texts.values())), text)}" for way, text in texts.items())
    print(f"characters in common: {shared or 'none'}; failed: {', '.join(failed) or 'none'}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
