"""One rank of several on loopback: `python -m support.engines.pair RANK RANKS PORT SCENARIOS` runs JSON scenarios in order.

Rank 0 prints the result of each, with the answer of a single process.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from subprocess import PIPE, Popen
from threading import Timer
from typing import Any

from mlxinfer import AsyncLLM, SamplingParams, kernels_cpu
from mlxinfer.config import EngineArgs
from mlxinfer.distributed.group import Group
from mlxinfer.distributed.group_llm import GroupLLM
from mlxinfer.distributed.nodes import Host, Nodes
from mlxinfer.distributed.ring import name_ring
from mlxinfer.distributed.worker_process import run_worker
from mlxinfer.engine.core.schedule import Schedule

from .drafting import Free

PATIENT_S = 60.0
"""Machines that run tests may stand still for a while."""


@dataclass
class Scenario:
    model: str
    prompts: list[Any]
    params: list[dict[str, Any]]
    settings: dict[str, Any] = field(default_factory=dict)
    preempts: int = 0
    """Steps after which the last of several running sequences has to give its pages back; 0 is never."""
    rounds: int = 1
    split: str = "pipeline"
    eager: bool = False
    """Draft whatever it costs: tiny models would rather not."""


def draft_always(llm: AsyncLLM) -> None:
    """Have drafts in every step, of a draft model or a head if there is one."""
    outputs = llm._thread._outputs
    assert outputs is not None
    proposer = outputs.engine.proposer
    proposer.times, proposer.account.share = Free(), 1e9
    if proposer.draft is not None:
        proposer.draft.cost = 1e-4


def preempt(llm: AsyncLLM, every: int) -> None:
    """Have the last of several running sequences preempted every few steps."""
    outputs = llm._thread._outputs
    assert outputs is not None
    scheduler, count = outputs.engine.scheduler, itertools.count(1)
    schedule, running = scheduler.schedule, scheduler.running

    def with_preemptions() -> Schedule:
        return Schedule(preempt=[running[-1]]) if not next(count) % every and len(running) > 1 else schedule()

    scheduler.schedule = with_preemptions  # type: ignore[method-assign]


def nodes_at(port: int, count: int = 2) -> Nodes:
    return Nodes(tuple(Host("127.0.0.1", port + 1 + rank) for rank in range(count)))


async def answers(llm: AsyncLLM, scenario: Scenario) -> dict[str, Any]:
    await llm.ready()
    params = [_params(each) for each in scenario.params]
    rounds = [await llm.generate(scenario.prompts, params, **options(scenario)) for _ in range(scenario.rounds)]
    stats = llm.stats()
    return {
        "tokens": [[list(each.token_ids) for each in found] for found in rounds],
        "texts": [each.text for each in rounds[-1]],
        "logprobs": [[p.logprob for p in each.logprobs or ()] for each in rounds[-1]],
        **{name: getattr(stats, name) for name in ("steps", "pages", "preemptions", "reused_tokens", "drafted_tokens", "accepted_tokens")},
    }


def options(scenario: Scenario) -> dict[str, Any]:
    adapters = scenario.settings.get("adapters")
    chosen = any("adapter" in each for each in scenario.params)
    return {"adapter": next(iter(adapters))} if adapters and not chosen else {}


def _params(values: dict[str, Any]) -> SamplingParams:
    from mlxinfer import Regex

    given = {**values, "structure": Regex(values["regex"])} if "regex" in values else values
    return SamplingParams(**{name: value for name, value in given.items() if name != "regex"})


async def lead(scenario: Scenario, nodes: Nodes) -> dict[str, Any]:
    args = EngineArgs(scenario.model, **scenario.settings)
    group = Group(nodes, silence_s=PATIENT_S, split=scenario.split)
    llm = GroupLLM.joined(group, args)
    try:
        await llm.ready()
        if scenario.preempts:
            llm._thread.compute(lambda: preempt(llm, scenario.preempts))
        if scenario.eager:
            llm._thread.compute(lambda: draft_always(llm))
        found = await answers(llm, scenario)
        found["weights"], found["rows"] = llm.weight_bytes, group.row_bytes
        found["read"], found["layouts"] = group.read, group.sent_bytes
    finally:
        await llm.close()
    alone = AsyncLLM.of(args)
    await alone.ready()
    if scenario.eager:
        alone._thread.compute(lambda: draft_always(alone))
    found["alone"] = await answers(alone, scenario)
    found["alone"]["weights"] = alone.weight_bytes
    await alone.close()
    return found


def run_pair(scenarios: list[Scenario], port: int, timeout_s: float = 120.0, ranks: int = 2) -> list[dict[str, Any]]:
    """All ranks of all scenarios. Returns what `lead` found for each. Without CPU kernels a step takes several times as long."""
    timeout_s *= 1 if kernels_cpu.in_use() else 3
    told = json.dumps([asdict(each) for each in scenarios])
    tests = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests)]), "MLXINFER_THREADS": "1"}
    command = [sys.executable, "-m", "support.engines.pair"]
    first, *others = [
        Popen([*command, str(rank), str(ranks), str(port), told], cwd=tests, env=environment, stdout=PIPE, stderr=PIPE, text=True)
        for rank in range(ranks)
    ]
    ending = Timer(timeout_s, lambda: [rank.kill() for rank in (first, *others)])
    ending.start()
    output, errors = first.communicate()
    for other in others:
        other.kill()
        errors += other.communicate()[1][-3000:]
    ending.cancel()
    found = [json.loads(line) for line in output.splitlines()]
    assert len(found) == len(scenarios), errors[-6000:]
    return found


def main() -> None:
    rank, count, port = map(int, sys.argv[1:4])
    scenarios = [Scenario(**each) for each in json.loads(sys.argv[4])]
    nodes = nodes_at(port, count)
    name_ring(nodes, rank)
    nothing: Callable[[], None] = lambda: None  # noqa: E731
    for scenario in scenarios:
        if rank:
            run_worker(scenario.model, nodes, rank, None, nothing, silence_s=PATIENT_S, adapters=scenario.settings.get("adapters"))
        else:
            print(json.dumps(asyncio.run(lead(scenario, nodes))), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
