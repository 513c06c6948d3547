"""Counts what one model costs, in a process of its own: `python -m benchmarks.launches.count MODEL` prints one JSON object.

A process of its own because everything in it has to be imported on the GPU that computes nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median, mode
from typing import TYPE_CHECKING, Any

from .phantom import PhantomGPU

if TYPE_CHECKING:
    from .models import Subject
    from .programs import Program, Turn

CEILING = Path(__file__).with_name("ceiling.json")
ROWS = (1, 4, 8)
PERIOD = 12
"""Layers of different kinds repeat after so many at most: 1, 2, 3, 4 or 6."""
FEW_STEPS = 4


@dataclass(frozen=True, slots=True)
class Count:
    """One kind of work by one program. All but `host_us` and `exposed_us` is computed from graphs."""

    program: str
    """"mlxinfer" or "mlx-lm"."""
    work: str
    """"decode 1", "decode 4" or "decode 8" (a step of so many rows), or "prefill" (a whole prompt)."""
    launches: int
    """Of the step, or of the prompt."""
    stages: int
    """Of these, launches that have to run one after another."""
    layer_launches: float
    """Of one layer, on average; 0 for prompts."""
    layer_stages: float
    """Of these, launches that have to run one after another."""
    reads: int
    """Bytes that launches ask for, repeated ones included."""
    distinct: int
    """Bytes that they read, each launch's once."""
    matrix: int
    """Bytes of weights within `reads`."""
    writes: float
    """Bytes that they write; for decoding the average over steps that grow no pool."""
    syncs: float
    """Waits of the host per step or prompt."""
    drains: float
    """Waits of the GPU for the host."""
    host_us: float
    """Microseconds of the host for a step or a prompt, measured on this machine's processor."""
    exposed_us: float
    """The part of these between a drain and the next submission, while the GPU waits."""
    names: dict[str, int]
    """Launches by name."""
    seconds: dict[str, float]
    """Computed seconds by chip."""


def count(subject: Subject, gpu: PhantomGPU, past: int, prompt: int, kv: str, chunk: int | None) -> list[Count]:
    """Everything about both programs."""
    from .programs import MLXLM, Ours

    makers: dict[str, Callable[[Subject], Program]] = {
        "mlxinfer": lambda model: Ours(gpu, model, kv, chunk),
        "mlx-lm": lambda model: MLXLM(gpu, model),
    }
    found = []
    for name, make in makers.items():
        program = make(subject)
        found += [_decoding(name, make, program, subject, rows, past) for rows in ROWS]
        found.append(_reading(name, program, prompt))
    return found


def layer(make: Callable[[Subject], Program], subject: Subject, rows: int, past: int) -> tuple[float, float]:
    """Launches and stages of one layer, on average: what so many layers more add to a step."""
    from .ledger import ledger

    depth = min(PERIOD, layers(subject) // 2)
    sizes = []
    for cut in (depth, 2 * depth):
        turn = _typical(make(with_layers(subject, cut)).decode(rows, past, FEW_STEPS))
        sizes.append(ledger(turn.graphs[0]))
    small, large = sizes
    return (large.count - small.count) / depth, (large.stages - small.stages) / depth


def layers(subject: Subject) -> int:
    config = subject.config.get("text_config", subject.config)
    return int(config["num_hidden_layers"])


def with_layers(subject: Subject, count: int) -> Subject:
    """The model with its first layers only."""
    whole = layers(subject)

    def cut(config: dict[str, Any]) -> dict[str, Any]:
        by_layer = {key: value for key, value in config.items() if isinstance(value, list) or key == "hybrid_override_pattern"}
        lists = {key: value[:count] for key, value in by_layer.items() if len(value) == whole}
        inner = {"text_config": cut(config["text_config"])} if "text_config" in config else {"num_hidden_layers": count}
        return config | lists | inner

    return replace(subject, config=cut(subject.config))


def _typical(turns: list[Turn]) -> Turn:
    """A step as most are, which fill no page and write no recent rows into theirs."""
    sizes = [len(turn.graphs[0].nodes) for turn in turns if len(turn.graphs) == 1]
    usual = mode(sizes) if sizes else 0
    return next((turn for turn in turns if len(turn.graphs) == 1 and len(turn.graphs[0].nodes) == usual), turns[0])


def written(turns: list[Turn]) -> float:
    """Bytes written per step, on average: some write what others have put off. Without steps in which pools grow, which are rare."""
    from .ledger import ledger

    usual = [ledger(turn.graphs[0]).writes for turn in turns if len(turn.graphs) == 1]
    return sum(usual) / len(usual)


def _decoding(name: str, make: Callable[[Subject], Program], program: Program, subject: Subject, rows: int, past: int) -> Count:
    from .chips import CHIPS
    from .cost import seconds
    from .ledger import ledger, total

    turns = program.decode(rows, past)
    turn = _typical(turns)
    step = ledger(turn.graphs[0])
    others = [turn.graphs for turn in turns if len(turn.graphs) > 1]
    host = median(turn.seconds for turn in turns)
    drains, exposed = (sum(each) / len(turns) for each in ([turn.drains for turn in turns], [turn.exposed for turn in turns]))
    speeds = {}
    for chip in CHIPS:
        usual = seconds(ledger(turn.graphs[0], chip.gpu), chip)
        rare = sum(seconds(total(graphs, chip.gpu), chip) - usual for graphs in others) / len(turns)
        speeds[chip.name] = usual + rare + seconds(total([]), chip, drains=drains, host_s=exposed)
    wide, deep = layer(make, subject, rows, past)
    return Count(
        name, f"decode {rows}", step.count, step.stages, wide, deep, step.reads, step.distinct, step.matrix, written(turns),
        sum(turn.syncs for turn in turns) / len(turns), drains, host * 1e6, exposed * 1e6, dict(step.names), speeds,
    )  # fmt: skip


def _reading(name: str, program: Program, prompt: int) -> Count:
    from .chips import CHIPS
    from .cost import seconds
    from .ledger import total

    turn = program.prefill(prompt)
    whole = total(turn.graphs)
    speeds = {chip.name: seconds(total(turn.graphs, chip.gpu), chip, drains=turn.drains, host_s=turn.exposed) for chip in CHIPS}
    return Count(
        name, "prefill", whole.count, whole.stages, 0, 0, whole.reads, whole.distinct, whole.matrix, whole.writes,
        turn.syncs, turn.drains, turn.seconds * 1e6, turn.exposed * 1e6, dict(whole.names), speeds,
    )  # fmt: skip


def ceilings(gpu: PhantomGPU, limits: dict[str, Any]) -> dict[str, Any]:
    """What `ceiling.json` limits, as it is now: per model and past, launches and stages of a layer of one row; bytes that a step of two
    layers writes for each row, by rows; drains of a long prompt."""
    from .models import subject
    from .programs import Ours

    def ours(model: Subject) -> Program:
        return Ours(gpu, model)

    found: dict[str, Any] = {}
    for name, pasts in limits["layer"].items():
        model = subject(name, 4)
        for past in pasts:
            wide, deep = layer(ours, model, 1, int(past))
            found.setdefault("layer", {}).setdefault(name, {})[past] = {"launches": wide, "stages": deep}
    shallow = with_layers(subject("llama-3.1", 4), 2)
    found["written"] = {rows: round(written(ours(shallow).decode(int(rows), 1024)) / int(rows)) for rows in limits["written"]}
    found["prompt"] = {tokens: {"drains": ours(shallow).prefill(int(tokens)).drains} for tokens in limits["prompt"]}
    return found


def lowered(limits: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """The limits, lowered to what there is now where that is less."""
    return {
        key: lowered(limit, now[key]) if isinstance(limit, dict) else min(limit, int(now[key]) if now[key] == int(now[key]) else now[key])
        for key, limit in limits.items()
    }


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.launches.count")
    parser.add_argument("model", nargs="?")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--past", type=int, default=1024)
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--kv", default="16")
    parser.add_argument("--chunk", type=int)
    parser.add_argument("--ceilings", action="store_true", help="what ceiling.json limits, and nothing else")
    parser.add_argument("--lower", action="store_true", help="the same, and lower the limits to that")
    options = parser.parse_args(arguments)
    with PhantomGPU() as gpu:
        if options.ceilings or options.lower:
            limits = json.loads(CEILING.read_text(encoding="utf-8"))
            now = ceilings(gpu, limits)
            if options.lower:
                CEILING.write_text(json.dumps(lowered(limits, now), indent=1) + "\n", encoding="utf-8")
            print(json.dumps({"limits": limits, "now": now}))
            return
        from .models import subject

        model = subject(options.model, options.bits)
        counts = count(model, gpu, options.past, options.prompt, options.kv, options.chunk)
        print(json.dumps({"layers": layers(model), "counts": [asdict(each) for each in counts]}))


if __name__ == "__main__":
    main(sys.argv[1:])
