"""Checks of `mlxinfer doctor --nodes`: reachable machines, equal versions, sufficient memory, and the resulting plan.

Each machine is queried by ssh, as `mlx.launch` starts them.
"""

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
from .nodes import Host, Nodes
from .plan import plan_split

_PATIENCE_S = 30.0
_COMPARED = ("mlxinfer", "mlx")
"""Packages that must have the same version on all machines."""

DoctorQuery = Callable[[Host], str]
"""Returns the output of `mlxinfer doctor --json` on a machine. Raises OSError with the reason for a failure."""


@dataclass(frozen=True, slots=True)
class MachineCheck:
    """Result for one machine."""

    label: str
    """Rank and name."""
    found: dict[str, Any]
    """JSON of `mlxinfer doctor --json` on the machine; empty if the query failed."""
    problem: str
    """Reason for a failed query, or for which the machine cannot take part; "" if it can."""

    @property
    def usable(self) -> int:
        """Bytes that a model may take on the machine."""
        return int(self.found.get("usable_bytes", 0))

    def line(self) -> str:
        """Return the result for people."""
        if not self.found:
            return f"{self.label}: {self.problem}"
        versions = ", ".join(f"{name} {self.found['versions'].get(name)}" for name in _COMPARED)
        told = f"{self.label}: {self.found.get('device', '?')}, {self.usable / 1e9:.3g} GB may be used, {versions}"
        return f"{told}; {self.problem}" if self.problem else told


def check_machines(nodes: Nodes, query: DoctorQuery | None = None) -> list[MachineCheck]:
    """Query all machines at once."""
    query = query or query_machine

    def one(rank: int) -> MachineCheck:
        label = nodes.label(rank)
        try:
            found = json.loads(query(nodes.nodes[rank]))
        except (OSError, ValueError) as error:
            return MachineCheck(label, {}, f"cannot be asked: {one_line(error)}")
        return MachineCheck(label, found if isinstance(found, dict) else {}, "")

    with ThreadPoolExecutor(len(nodes)) as pool:
        machines = list(pool.map(one, range(len(nodes))))
    return [_compared(each, machines[0]) for each in machines]


def _compared(machine: MachineCheck, first: MachineCheck) -> MachineCheck:
    for name in _COMPARED if machine.found and first.found else ():
        own, other = machine.found["versions"].get(name), first.found["versions"].get(name)
        if own != other:
            return MachineCheck(machine.label, machine.found, f"rank 0 has {name} {other}: install the same")
    return machine


def query_machine(node: Host) -> str:
    """Run `mlxinfer doctor --json` by ssh, or in a process of this machine for loopback addresses. Raises OSError."""
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


def plan_lines(model: str, kv: KVFormat, nodes: Nodes, machines: Sequence[MachineCheck]) -> Iterator[str]:
    """Yield the blocks of each machine and the communication cost. Raises `MLXInferError` if no plan is possible."""
    if any(machine.problem for machine in machines):
        raise MLXInferError("no plan, as not all machines can take part")
    with prepare(model, kv=kv) as found:
        plan = plan_split(found, kv, [machine.usable for machine in machines])
        yield from plan.lines([nodes.label(rank) for rank in range(len(nodes))])
        yield from estimate_lines(found, plan)
