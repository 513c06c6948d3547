"""Compares the answers of a model with few experts in memory with those of the same model with all of them, number for number."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import click

from .cap import MemoryCap
from .models import RANGE, SHAPES, first_token, make_model

_HEADROOM = 1 << 30
"""Bytes that the control group has besides weights: the interpreter, a step, the cache, and pages of the files that are read."""
_RANK, _SIZE = 4, 0.02
_TOKENS = 16


def answers(model: str, experts_memory: float, adapter: str) -> dict[str, Any]:
    """Run batches with every kind of request. Returns tokens, log-probabilities, counts and the memory used.

    The first engine computes every row in the same shapes whatever runs beside it. Its log-probabilities do not depend on times, so they
    must be equal. The second engine drafts: when pages of its cache are quantized depends on drafts, so only its tokens must be equal.
    """
    from mlxinfer import LLM

    settings: Any = {"kv": "4", "max_num_seqs": 4, "max_context": 1024, "adapters": {"changed": adapter}}
    found: dict[str, Any] = {}
    kinds: dict[str, Any] = {"exact": {"deterministic": True, "speculate": False}, "drafted": {"speculate": True}}
    for name, kind in kinds.items():
        with LLM(model, experts_memory=experts_memory, **settings, **kind) as llm:
            if name == "drafted":
                vars(llm.engine.proposer).update(times=_free_steps())
                llm.engine.proposer.account.share = 1e9
            tokens = [each for batch in _batches(llm) for each in batch]
            stats = llm.stats()
            counts = {"hits": stats.expert_hits, "misses": stats.expert_misses, "drafts": stats.drafted_tokens}
            counts |= {"reused": stats.reused_tokens, "planned": llm.plan.used}
        found[name] = counts | {"tokens": tokens if name == "exact" else [each[0] for each in tokens]}
    return found | _memory()


def _free_steps() -> Any:
    """Return step times with which every draft is worth trying."""
    from mlxinfer.engine.core.step_times import StepTimes

    class FreeSteps(StepTimes):
        def observe(self, *args: Any, **named: Any) -> None: ...

        def step(self, rows: int) -> float:
            return 1.0

        def round(self, rows: int) -> float:
            return 1.0

    return FreeSteps()


def _batches(llm: Any) -> Iterator[list[list[Any]]]:
    """Yield the tokens of each batch with their log-probabilities and those of the likeliest tokens.

    The requests have prefixes, drafts, an adapter, samples, a pattern and a schema.
    """
    from mlxinfer import Regex, SamplingParams, Schema

    def walk(routing: str, start: int, count: int) -> list[int]:
        return [first_token(routing) + (start + i) % RANGE for i in range(count)]

    greedy: Any = {"temperature": 0.0, "max_tokens": _TOKENS, "ignore_eos": True, "logprobs": 3}
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
    prompts = [walk("uniform", 0, 200), walk("sticky", 40, 70), [*walk("zipf", 0, 40), *walk("zipf", 0, 12)]]
    kinds: list[Any] = [
        SamplingParams(**greedy),
        SamplingParams(**greedy, adapter="changed"),
        SamplingParams(**(greedy | {"temperature": 0.9}), seed=3, n=2),
        SamplingParams(**(greedy | {"ignore_eos": False}), structure=Regex("[a-z]{3}[0-9]+x")),
        SamplingParams(**(greedy | {"ignore_eos": False}), structure=Schema(schema)),
    ]
    for texts in (prompts, [prompts[0], prompts[1], prompts[0], prompts[2], prompts[2]]):
        found = llm.generate(texts, kinds[: len(texts)])
        tokens = [each for answer in found for each in answer.logprobs]
        yield [[each.token_id, each.logprob, *((token, logprob) for token, _, logprob in each.top)] for each in tokens]


def _memory() -> dict[str, int]:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    values = dict(line.split(":", 1) for line in lines)
    return {name: int(values.get(key, "0").split()[0]) * 1024 for name, key in (("peak_rss", "VmHWM"), ("swap", "VmSwap"))}


def write_adapter(folder: Path, name: str) -> Path:
    """Write a LoRA adapter of random numbers for the queries and values of a shape."""
    import mlx.core as mx
    import numpy as np

    shape, rng = SHAPES[name], np.random.default_rng(1)
    rows = {"q_proj": shape.heads * shape.head, "v_proj": shape.kv_heads * shape.head}
    tensors = {}
    for layer in range(shape.layers):
        for part, count in rows.items():
            key = f"base_model.model.model.layers.{layer}.self_attn.{part}"
            tensors[f"{key}.lora_A.weight"] = mx.array(rng.normal(0, _SIZE, (_RANK, shape.hidden)).astype(np.float32))
            tensors[f"{key}.lora_B.weight"] = mx.array(rng.normal(0, _SIZE, (count, _RANK)).astype(np.float32))
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "adapter_model.safetensors"), tensors)
    config = {"peft_type": "LORA", "r": _RANK, "lora_alpha": 2 * _RANK, "target_modules": [*rows], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@click.command("expert-exactness")
@click.option("--folder", type=click.Path(path_type=Path), required=True, help="For models of 5 GB each, which are kept for the next run.")
@click.option("--shapes", default=",".join(SHAPES), show_default=True)
@click.option("--share", default=0.3, show_default=True, help="Share of the experts' bytes that is in memory.")
def exactness(folder: Path, shapes: str, share: float) -> None:
    """Compare answers with few experts in memory with those of the resident model: tokens and log-probabilities must be equal.

    Both processes answer batches with a prefix cache, a cache of 4 bits, drafts, an adapter, a pattern and a schema. The pooled one runs in
    a control group with memory for the dense weights, its share of the experts and a headroom.
    """
    wrong = False
    for name in shapes.split(","):
        model, adapter = make_model(name, folder), write_adapter(folder / f"adapter-{name}", name)
        whole = _run(model, 0.0, adapter, None)
        with MemoryCap() as cap:
            cap.set(model.stat().st_size - int((1 - share) * SHAPES[name].all_experts) + _HEADROOM)
            pooled = _run(model, share * SHAPES[name].all_experts / 1e9, adapter, cap)
            swapped = cap.swapped()
        for kind in ("exact", "drafted"):
            one, other = whole[kind], pooled[kind]
            equal = one["tokens"] == other["tokens"]
            wrong |= not equal
            print(
                f"{name}, {kind}: {len(one['tokens'])} tokens {'are equal' if equal else 'DIFFER'}; {other['hits']} hits, "
                f"{other['misses']} misses, {other['drafts']} drafts, {other['reused']} tokens from the prefix cache"
            )
        planned = pooled["exact"]["planned"]
        wrong |= bool(swapped + pooled["swap"])
        print(
            f"{name}: peak RSS {pooled['peak_rss'] / 1e9:.2f} GB, planned {planned / 1e9:.2f} GB; with all experts in memory "
            f"{whole['peak_rss'] / 1e9:.2f} GB; swapped {swapped + pooled['swap']} bytes",
            flush=True,
        )
    sys.exit(wrong)


def _run(model: Path, gigabytes: float, adapter: Path, cap: MemoryCap | None) -> dict[str, Any]:
    """Return `answers` of another process."""
    command = [sys.executable, "-m", "benchmarks.experts.exactness", str(model), str(gigabytes), str(adapter)]
    done = subprocess.run(cap.command(command) if cap else command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    _model, _gigabytes, _adapter = islice(sys.argv, 1, 4)
    print(json.dumps(answers(_model, float(_gigabytes), _adapter)))
