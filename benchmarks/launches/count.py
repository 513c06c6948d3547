"""Counts the launches of one model: `python -m benchmarks.launches.count MODEL` prints a JSON object.

This is a separate process, because all modules must be imported on the phantom GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median, mode
from typing import TYPE_CHECKING, Any

from .chips import CHIPS
from .cost import STAGE_S, seconds
from .ledger import Ledger, ledger, total
from .phantom import PhantomGPU
from .report import BUILT, MLX_LM, REPLAYED

if TYPE_CHECKING:
    from .models import Subject
    from .programs import Program, Turn

CEILING = Path(__file__).with_name("ceiling.json")
ROWS = (1, 4, 8)
PERIOD = 12
"""Layers after which kinds repeat, for periods of 1, 2, 3, 4 and 6."""
FEW_STEPS = 4
_SHARED = "num_kv_shared_layers"
_ROUNDS = 5
"""Medians of the host's time are of so many rounds."""


@dataclass(frozen=True, slots=True)
class Count:
    """The cost of a work of a program. All but `host_us` and `exposed_us` are computed from graphs.

    `program` is "mlxinfer" or "mlx-lm". `work` is "decode 1", "decode 4" or "decode 8", a step of so many rows, or "prefill", a prompt.
    `launches` and `stages` are those of the step or prompt; `layer_launches` and `layer_stages` those of a layer on average, 0 for prompts.
    `layer_source` are bytes of kernels' sources, which MLX hashes on the host at every launch.
    Launches of different stages run one after another. `reads` are bytes, including repeated ones; `distinct` counts each launch's bytes
    once; `matrix` are weights among `reads`. `writes` of decoding are an average over steps in which no pool grows. `syncs` are waits of
    the host, `drains` waits of the GPU for the host. `host_us` are microseconds of this machine's processor, `exposed_us` those between a
    drain and the next submission, `built_us` those of a step of this project that Python builds, where `host_us` is replayed. `names`
    counts launches by name. `seconds` are the GPU's by chip, for each cost in `STAGE_S`.
    """

    program: str
    work: str
    launches: int
    stages: int
    layer_launches: float
    layer_stages: float
    layer_source: float
    reads: int
    distinct: int
    matrix: int
    writes: float
    syncs: float
    drains: float
    host_us: float
    exposed_us: float
    names: dict[str, int]
    seconds: dict[str, list[float]]
    built_us: float = 0.0


def count(subject: Subject, gpu: PhantomGPU, past: int, prompt: int, kv: str, chunk: int | None) -> list[Count]:
    """Count both programs."""
    from .programs import MLXLM, Ours

    makers: dict[str, Callable[[Subject], Program]] = {"mlxinfer": partial(Ours, gpu, kv=kv, chunk=chunk), "mlx-lm": partial(MLXLM, gpu)}
    found = []
    for name, make in makers.items():
        program = make(subject)
        found += [_decoding(name, make, program, subject, rows, past) for rows in ROWS]
        found.append(_reading(name, program, prompt))
    times = host(subject, gpu, past, kv)
    return [_timed(each, times[each.work.split()[1]]) if each.work != "prefill" else each for each in found]


def host_us(programs: Mapping[str, Program], rows: int, past: int) -> dict[str, float]:
    """Microseconds of this machine's processor for a step, by program: medians of rounds in which they take turns."""
    found: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(_ROUNDS):
        for name, program in programs.items():
            found[name].append(1e6 * median(turn.seconds for turn in program.decode(rows, past, recording=False)))
    return {name: median(times) for name, times in found.items()}


def host(subject: Subject, gpu: PhantomGPU, past: int, kv: str) -> dict[str, dict[str, float]]:
    """`host_us` by number of rows, of built and replayed steps and of mlx-lm."""
    from .programs import MLXLM, Ours

    ours = {name: Ours(gpu, subject, kv=kv, replays=name == REPLAYED) for name in (BUILT, REPLAYED)}
    return {str(rows): host_us({**ours, MLX_LM: MLXLM(gpu, subject)}, rows, past) for rows in ROWS}


def _timed(found: Count, times: Mapping[str, float]) -> Count:
    built = times[found.program]
    return replace(found, host_us=times[REPLAYED], built_us=built) if found.program == BUILT else replace(found, host_us=built)


def layer(make: Callable[[Subject], Program], subject: Subject, rows: int, past: int) -> tuple[float, float, float]:
    """Launches, stages and bytes of sources of a layer on average, from two depths of the model."""
    depth = min(PERIOD, layers(subject) // 2)
    small, large = (ledger(_typical(make(with_layers(subject, cut)).decode(rows, past, FEW_STEPS)).graphs[0]) for cut in (depth, 2 * depth))
    return (large.count - small.count) / depth, (large.stages - small.stages) / depth, (large.source - small.source) / depth


def layers(subject: Subject) -> int:
    config = subject.config.get("text_config", subject.config)
    return int(config["num_hidden_layers"])


def with_layers(subject: Subject, count: int) -> Subject:
    """The model with its first `count` layers, of which as large a part shares keys and values."""
    whole = layers(subject)

    def cut(config: dict[str, Any]) -> dict[str, Any]:
        by_layer = {key: value for key, value in config.items() if isinstance(value, list) or key == "hybrid_override_pattern"}
        found = {key: value[:count] for key, value in by_layer.items() if len(value) == whole}
        if config.get(_SHARED):
            found[_SHARED] = round(config[_SHARED] * count / whole)
        inner = {"text_config": cut(config["text_config"])} if "text_config" in config else {"num_hidden_layers": count}
        return config | found | inner

    return replace(subject, config=cut(subject.config))


def _typical(turns: list[Turn]) -> Turn:
    """A step of the most frequent size, which fills no page and writes no recent rows into a page."""
    sizes = [len(turn.graphs[0].nodes) for turn in turns if len(turn.graphs) == 1]
    usual = mode(sizes) if sizes else 0
    return next((turn for turn in turns if len(turn.graphs) == 1 and len(turn.graphs[0].nodes) == usual), turns[0])


def written(turns: list[Turn]) -> float:
    """Bytes written per step on average, because some steps write the rows of others. The rare steps in which pools grow do not count."""
    usual = [ledger(turn.graphs[0]).writes for turn in turns if len(turn.graphs) == 1]
    return sum(usual) / len(usual)


def _decoding(name: str, make: Callable[[Subject], Program], program: Program, subject: Subject, rows: int, past: int) -> Count:
    turns = program.decode(rows, past)
    turn = _typical(turns)
    step = ledger(turn.graphs[0])
    others = [turn.graphs for turn in turns if len(turn.graphs) > 1]
    drains, exposed = (sum(each) / len(turns) for each in ([turn.drains for turn in turns], [turn.exposed for turn in turns]))
    speeds = dict[str, list[float]]()
    for chip in CHIPS:
        one, more = ledger(turn.graphs[0], chip.gpu), [total(graphs, chip.gpu) for graphs in others]
        for stage in STAGE_S:
            usual = seconds(one, chip, stage)
            rare = sum(seconds(each, chip, stage) - usual for each in more) / len(turns)
            speeds.setdefault(chip.name, []).append(usual + rare + seconds(total([]), chip, stage, drains=drains, host_s=exposed))
    syncs, host = sum(turn.syncs for turn in turns) / len(turns), median(turn.seconds for turn in turns)
    return _counted(name, f"decode {rows}", step, layer(make, subject, rows, past), written(turns), (syncs, drains, host, exposed), speeds)


def _reading(name: str, program: Program, prompt: int) -> Count:
    turn = program.prefill(prompt)
    whole = total(turn.graphs)
    speeds = dict[str, list[float]]()
    for chip in CHIPS:
        done = total(turn.graphs, chip.gpu)
        speeds[chip.name] = [seconds(done, chip, stage, drains=turn.drains, host_s=turn.exposed) for stage in STAGE_S]
    return _counted(name, "prefill", whole, (0, 0, 0), whole.writes, (turn.syncs, turn.drains, turn.seconds, turn.exposed), speeds)


def _counted(
    name: str,
    work: str,
    done: Ledger,
    layer: tuple[float, float, float],
    writes: float,
    host: tuple[float, ...],
    speeds: dict[str, list[float]],
) -> Count:
    syncs, drains, seconds, exposed = host
    return Count(
        name, work, done.count, done.stages, *layer, done.reads, done.distinct, done.matrix, writes, syncs, drains, seconds * 1e6,
        exposed * 1e6, dict(done.names), speeds,
    )  # fmt: skip


def ceilings(gpu: PhantomGPU, limits: dict[str, Any]) -> dict[str, Any]:
    """Today's figures of the limits in `ceiling.json`: launches and stages of a layer of one row, by model and past; bytes that a step of
    two layers writes per row, by rows; drains of a long prompt."""
    from .models import subject
    from .programs import Ours

    ours, found = partial(Ours, gpu), dict[str, Any]()
    for name, pasts in limits["layer"].items():
        model = subject(name, 4)
        for past in pasts:
            wide, deep, _ = layer(ours, model, 1, int(past))
            found.setdefault("layer", {}).setdefault(name, {})[past] = {"launches": wide, "stages": deep}
    shallow = with_layers(subject("llama-3.1", 4), 2)
    found["written"] = {rows: round(written(ours(shallow).decode(int(rows), 1024)) / int(rows)) for rows in limits["written"]}
    found["prompt"] = {tokens: {"drains": ours(shallow).prefill(int(tokens)).drains} for tokens in limits["prompt"]}
    return found


def lowered(limits: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """The limits, lowered to today's figures where these are less."""
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
    parser.add_argument("--host", action="store_true", help="print only the host's microseconds per step, by rows and program")
    parser.add_argument("--layers", type=int, help="count only so many of the model's layers")
    parser.add_argument("--ceilings", action="store_true", help="print only the figures of the limits in ceiling.json")
    parser.add_argument("--lower", action="store_true", help="the same, and lower the limits to these figures")
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
        if options.layers:
            model = with_layers(model, options.layers)
        if options.host:
            print(json.dumps(host(model, gpu, options.past, options.kv)))
            return
        counts = count(model, gpu, options.past, options.prompt, options.kv, options.chunk)
        print(json.dumps({"layers": layers(model), "counts": [asdict(each) for each in counts]}))


if __name__ == "__main__":
    main(sys.argv[1:])
