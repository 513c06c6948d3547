"""The hostfile: machines in the order of their ranks, in MLX's format (`mlx.launch --hostfile`)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from ..errors import NodesError
from ..util.dataclass import dataclass

PORT = 32323
"""Ring port of rank 0; rank r has the r-th port after it, as with `mlx.launch`. Rank 0 accepts control connections on the port before."""


@dataclass(frozen=True, slots=True)
class Host:
    """One machine of the hostfile."""

    address: str
    """IP address for the other machines."""
    port: int
    """TCP port in the ring."""
    name: str = ""
    """Name for ssh; "" if the hostfile has none."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """All machines, by rank."""

    nodes: tuple[Host, ...]
    """At least two."""

    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def control(self) -> tuple[str, int]:
        """Address and port of rank 0's control connections."""
        return self.nodes[0].address, self.nodes[0].port - 1

    @property
    def digest(self) -> str:
        """Hash of addresses and ports; equal on machines with the same hostfile."""
        return hashlib.sha256(repr([(n.address, n.port) for n in self.nodes]).encode()).hexdigest()[:16]

    def ring(self) -> str:
        """Return the content of the file that MLX_HOSTFILE names."""
        return json.dumps([[f"{node.address}:{node.port}"] for node in self.nodes])

    def label(self, rank: int) -> str:
        """Return a rank with its machine, for people."""
        node = self.nodes[rank]
        return f"rank {rank} ({node.name or node.address})"


def read_nodes(path: Path) -> Nodes:
    """Read a hostfile. Raises `NodesError`.

    It is a list of objects with `ips` and optionally `ssh`, an object with such a list as `hosts`, or lists of "address:port" as in
    MLX_HOSTFILE.
    """
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


def _node(path: Path, host: Any, rank: int) -> Host:
    if isinstance(host, dict) and isinstance(host.get("ips"), list) and host["ips"]:
        return Host(str(host["ips"][0]), PORT + rank, str(host.get("ssh") or ""))
    if isinstance(host, list) and host and isinstance(host[0], str) and host[0].rpartition(":")[2].isdecimal():
        address, _, port = host[0].rpartition(":")
        return Host(address, int(port))
    raise NodesError(f"the hostfile {path} has an entry {json.dumps(host)[:80]} without ips: it must be like {_EXAMPLE}")
