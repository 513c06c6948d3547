"""Measures the parts of a decode step of one sequence, with and without the CPU kernels.

Each part is evaluated alone, repeatedly; the median counts. The whole step runs through the engine. The difference is the engine's own
work, and waiting.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter, thread_time

import click
import mlx.core as mx

from mlxinfer import LLM
from mlxinfer.bench.machine import measure_machine
from mlxinfer.bench.measure import Bench
from mlxinfer.cache.base import PAGE, HeadSteps, Segment
from mlxinfer.cache.paged import PagedCache
from mlxinfer.cache.step import CacheStep
from mlxinfer.models.block import Block
from mlxinfer.models.decoder import Decoder
from mlxinfer.nn.attention import Attention
from mlxinfer.nn.mlp import GatedMLP

MODES = {
    "MLX alone": {"MLXINFER_CPU_KERNELS": "0"},
    "kernels, each operation alone": {"MLXINFER_WHOLE_BLOCKS": "0"},
    "kernels, whole blocks": {},
}
"""Environments of a measurement. This module itself reads MLXINFER_WHOLE_BLOCKS."""

_STEPS, _SAMPLES, _SECONDS = 32, 15, 3.0


def budgets(model: Path, depth: int) -> dict[str, dict[str, float]]:
    """Milliseconds by mode and part, in the order of a step. Raises `click.ClickException`."""
    found = {}
    for mode, settings in MODES.items():
        command = [sys.executable, "-m", __spec__.name, str(model), str(depth)]
        done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise click.ClickException(f"{mode}: {done.stderr.strip().splitlines()[-1]}")
        found[mode] = json.loads(done.stdout)
    return found


def table(found: dict[str, dict[str, float]]) -> str:
    """Markdown."""
    modes = list(found)
    lines = [f"| ms | {' | '.join(modes)} |", f"| --- | {' | '.join('---:' for _ in modes)} |"]
    for part in dict.fromkeys(part for budget in found.values() for part in budget):
        cells = [f"{budget[part]:.3g}" if part in budget else "" for budget in found.values()]
        lines.append(f"| {part} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


class _Step:
    """One row of a sequence after `depth` tokens, which can run repeatedly."""

    def __init__(self, model: Decoder, depth: int) -> None:
        self.model = model
        self.cache = PagedCache(model.layers, dtype=mx.float32, kv_cache_tokens=depth + 2 * PAGE, chunk=PAGE)
        slot = self.cache.open()
        for past in range(0, depth, PAGE):
            count = min(PAGE, depth - past)
            step = self.cache.begin([Segment(slot, 0, count, past, depth + 1)])
            mx.eval(model.hidden(mx.arange(count, dtype=mx.int32), step), step.state)
            self.cache.commit(step)
        self.segment = Segment(slot, 0, 1, depth, depth + 1)
        self.token = mx.array([1], mx.int32)
        self.x = model.embedding(self.token)
        mx.eval(self.x)

    def begin(self) -> CacheStep:
        return self.cache.begin([self.segment])

    def hidden(self) -> mx.array:
        return self.model.hidden(self.token, self.begin())

    def blocks(self) -> mx.array:
        return self.model.through(self.x, self.begin())

    def attention(self) -> list[mx.array]:
        """Attention of all layers, on prepared rows."""
        step, found = self.begin(), []
        rotations = {name: rope.at(step) for name, rope in self.model.ropes.items()}
        for block, rows in zip(self.model.blocks, self.rows, strict=True):
            assert isinstance(block, Block)
            a = block.mixer
            assert isinstance(a, Attention)
            heads = HeadSteps(a.q_norm, a.k_norm, None if block.rope is None else rotations[block.rope])
            found.append(step.attend_rows(a.layer, rows, heads, a.params))
        return found

    def products(self) -> list[mx.array]:
        """Matrix products of all blocks, on prepared rows."""
        found = []
        for block, answers, inner in zip(self.model.blocks, self.answers, self.inner, strict=True):
            assert isinstance(block, Block)
            a, mlp = block.mixer, block.mlp
            assert isinstance(a, Attention)
            assert isinstance(mlp, GatedMLP)
            found += a.qkv.runs(self.x, norm=block.norms.before_mixer)
            found.append(a.output(answers, onto=self.x))
            found.append(mlp.gate_up.gated(mlp.gate, self.x, norm=block.norms.before_mlp))
            found.append(mlp.down(inner, onto=self.x))
        return found

    def prepare(self) -> None:
        blocks = [block for block in self.model.blocks if isinstance(block, Block)]
        mixers = [block.mixer for block in blocks if isinstance(block.mixer, Attention)]
        mlps = [block.mlp for block in blocks if isinstance(block.mlp, GatedMLP)]
        self.rows = [a.qkv.runs(self.x) for a in mixers]
        self.answers = [mx.ones((1, a.output.matrix.shape[-1])) for a in mixers]
        self.inner = [mx.ones((1, mlp.down.matrix.shape[-1])) for mlp in mlps]
        mx.eval(self.rows, self.answers, self.inner)


def budget(path: Path, depth: int) -> dict[str, float]:
    if os.environ.get("MLXINFER_WHOLE_BLOCKS") == "0":
        CacheStep.runs_blocks = property(lambda step: False)  # type: ignore[assignment]
    llm = LLM(str(path), speculate=False, prefix_cache=False)
    model = llm.engine.model
    if not isinstance(model, Decoder):
        raise RuntimeError("only plain decoders are measured")
    step = _Step(model, depth)
    step.prepare()
    x = step.hidden()
    logits = model.logits(x)
    mx.eval(x, logits)
    found = {
        "building the graph (Python)": _typical(lambda: model.logits(step.hidden()), thread_time),
        "embedding": _typical(lambda: mx.eval(model.embedding(step.token))),
        "blocks": _typical(lambda: mx.eval(step.blocks())),
        "· of which products": _typical(lambda: mx.eval(step.products())),
        "· of which attention": _typical(lambda: mx.eval(step.attention())),
        "last norm and logits": _typical(lambda: mx.eval(model.logits(x))),
        "choosing a token": _typical(lambda: mx.eval(mx.argmax(logits, axis=-1))),
    }
    with Bench(llm.engine).filled(max(depth, 1), 1, _STEPS) as held:
        count = 1 if found["blocks"] > 50 else 7
        found["**the whole step**"] = median(Bench(llm.engine).decode(held, _STEPS) / _STEPS * 1e3 for _ in range(count))
    machine = measure_machine(llm.weight_bytes)
    found["reading the weights, at the speed of a plain read"] = llm.weight_bytes / machine.read_bytes * 1e3
    return found


def _typical(compute: Callable[[], object], clock: Callable[[], float] = perf_counter) -> float:
    """Median milliseconds, of as many samples as the time allows."""
    samples: list[float] = []
    until = perf_counter() + _SECONDS
    while len(samples) < 3 or (perf_counter() < until and len(samples) < 20 * _SAMPLES):
        start = clock()
        compute()
        samples.append((clock() - start) * 1e3)
    return median(samples)


if __name__ == "__main__":
    print(json.dumps(budget(Path(sys.argv[1]), int(sys.argv[2]))))
