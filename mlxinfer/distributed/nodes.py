"""The hostfile: which machines take part, in the order of their ranks. It is MLX's (`mlx.launch --hostfile`)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from ..errors import NodesError
from ..util.dataclass import dataclass

PORT = 32323
"""Where rank 0 has its ring port, and the others the ones after it, as `mlx.launch` does; rank 0 is told of ranks at the port before."""


@dataclass(frozen=True, slots=True)
class Node:
    """One machine."""

    address: str
    """IP address at which the others reach it."""
    port: int
    """TCP port of its place in the ring."""
    name: str = ""
    """Its name for ssh; empty where the hostfile has none."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """All machines, by rank."""

    nodes: tuple[Node, ...]
    """At least two."""

    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def control(self) -> tuple[str, int]:
        """Where rank 0 waits for the others, besides the ring."""
        return self.nodes[0].address, self.nodes[0].port - 1

    @property
    def digest(self) -> str:
        """Equal on all machines, unless somebody has another hostfile."""
        return hashlib.sha256(repr([(n.address, n.port) for n in self.nodes]).encode()).hexdigest()[:16]

    def ring(self) -> str:
        """The file that MLX_HOSTFILE names."""
        return json.dumps([[f"{node.address}:{node.port}"] for node in self.nodes])

    def label(self, rank: int) -> str:
        """A rank, for people."""
        node = self.nodes[rank]
        return f"rank {rank} ({node.name or node.address})"


def read_nodes(path: Path) -> Nodes:
    """Read a hostfile: a list of objects with `ips` and perhaps `ssh`, an object with such a list as `hosts`, or lists of "address:port",
    as MLX_HOSTFILE has them. Raises `NodesError`."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise NodesError(f"cannot read the hostfile {path}: {error.strerror}") from None
    except ValueError as error:
        raise NodesError(f"the hostfile {path} is not JSON: {error}") from None
    hosts = found.get("hosts") if isinstance(found, dict) else found
    if not isinstance(hosts, list) or len(hosts) < 2:
        raise NodesError(f"the hostfile {path} must list at least two machines, such as {_EXAMPLE}")
    return Nodes(tuple(_node(path, host, rank) for rank, host in enumerate(hosts)))


_EXAMPLE = '[{"ssh": "mac1", "ips": ["10.0.0.1"]}, {"ssh": "mac2", "ips": ["10.0.0.2"]}]'


def _node(path: Path, host: Any, rank: int) -> Node:
    if isinstance(host, dict) and isinstance(host.get("ips"), list) and host["ips"]:
        return Node(str(host["ips"][0]), PORT + rank, str(host.get("ssh") or ""))
    if isinstance(host, list) and host and isinstance(host[0], str) and host[0].rpartition(":")[2].isdecimal():
        address, _, port = host[0].rpartition(":")
        return Node(address, int(port))
    raise NodesError(f"the hostfile {path} has an entry {json.dumps(host)[:80]} without ips: it must be like {_EXAMPLE}")
