"""What `mlxinfer doctor --nodes` tells: whether all machines can be reached, have the same versions and enough memory, and who would have
which blocks. It asks each machine by ssh, as `mlx.launch` starts them."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..cache.kv_format import KVFormat
from ..errors import MLXInferError, one_line
from ..loading.load import prepare
from ..util.dataclass import dataclass
from .cost import estimate_lines
from .nodes import Node, Nodes
from .plan import plan_split

_PATIENCE_S = 30.0
_COMPARED = ("mlxinfer", "mlx")
"""Packages whose versions must be the same everywhere."""

Ask = Callable[[Node], str]
"""What `mlxinfer doctor --json` prints on a machine. Raises OSError with the reason where it cannot be asked."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What is known of one machine."""

    label: str
    """Its rank and its name."""
    found: dict[str, Any]
    """What `mlxinfer doctor --json` has printed there; empty where it could not be asked."""
    problem: str
    """Why it could not be asked, or cannot take part; empty where all is well."""

    @property
    def usable(self) -> int:
        """Bytes that a model may take there."""
        return int(self.found.get("usable_bytes", 0))

    def line(self) -> str:
        """For people."""
        if not self.found:
            return f"{self.label}: {self.problem}"
        versions = ", ".join(f"{name} {self.found['versions'].get(name)}" for name in _COMPARED)
        told = f"{self.label}: {self.found.get('device', '?')}, {self.usable / 1e9:.3g} GB may be used, {versions}"
        return f"{told}; {self.problem}" if self.problem else told


def examine(nodes: Nodes, ask: Ask | None = None) -> list[Machine]:
    """Ask all machines at once."""
    ask = ask or ask_there

    def one(rank: int) -> Machine:
        label = nodes.label(rank)
        try:
            found = json.loads(ask(nodes.nodes[rank]))
        except (OSError, ValueError) as error:
            return Machine(label, {}, f"cannot be asked: {one_line(error)}")
        return Machine(label, found if isinstance(found, dict) else {}, "")

    with ThreadPoolExecutor(len(nodes)) as pool:
        machines = list(pool.map(one, range(len(nodes))))
    return [_compared(each, machines[0]) for each in machines]


def _compared(machine: Machine, first: Machine) -> Machine:
    for name in _COMPARED if machine.found and first.found else ():
        own, other = machine.found["versions"].get(name), first.found["versions"].get(name)
        if own != other:
            return Machine(machine.label, machine.found, f"rank 0 has {name} {other}: install the same")
    return machine


def ask_there(node: Node) -> str:
    """By ssh, or in a process of this machine where the address is loopback. Raises OSError."""
    command = [sys.executable, "-m", __package__.split(".")[0], "doctor", "--json"]
    if not node.address.startswith("127."):
        target = node.name or node.address
        command = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", target, shlex.join(command)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S)
    except subprocess.TimeoutExpired:
        raise OSError(f"no answer within {_PATIENCE_S:g} s") from None
    if done.returncode:
        raise OSError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit status {done.returncode}")
    return done.stdout


def plan_lines(model: str, kv: KVFormat, nodes: Nodes, machines: Sequence[Machine]) -> Iterator[str]:
    """Who would have which blocks, and what that costs on the way. Raises `MLXInferError` where there is no such plan."""
    if any(machine.problem for machine in machines):
        raise MLXInferError("no plan, as not all machines can take part")
    with prepare(model, kv=kv) as found:
        plan = plan_split(found, kv, [machine.usable for machine in machines])
        yield from plan.lines([nodes.label(rank) for rank in range(len(nodes))])
        yield from estimate_lines(found, plan)
