"""Joining a ring whose neighbour dies, or whose port is in use."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.http.ports import free_port

from mlxinfer.distributed.nodes import Host, Nodes
from mlxinfer.distributed.ring import name_ring
from mlxinfer.errors import NodesError

_JOINS_ALONE = """
import sys
from mlxinfer.distributed import ring
from mlxinfer.distributed.nodes import Host, Nodes
ring.JOIN_S = 1
port, rank = int(sys.argv[1]), int(sys.argv[2])
ring.name_ring(Nodes((Host("127.0.0.1", port), Host("127.0.0.1", port + 1))), rank)
print("joining", flush=True)
ring.Ring()
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_it_does_not_wait_for_ever(rank: int) -> None:
    done = subprocess.run([sys.executable, "-c", _JOINS_ALONE, str(free_port()), str(rank)], timeout=60, check=False, capture_output=True)
    assert (done.stdout, done.returncode) == (b"joining\n", -signal.SIGALRM)


def test_a_port_in_use_is_an_error_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a weight is read, and before the others wait for this rank."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        (tmp_path / "ring.json").write_text(json.dumps([["127.0.0.1:1"], [f"127.0.0.1:{port}"]]))
        monkeypatch.setenv("MLX_RANK", "1")
        monkeypatch.setenv("MLX_HOSTFILE", str(tmp_path / "ring.json"))
        nodes = Nodes((Host("127.0.0.1", 1), Host("127.0.0.1", port)))
        told = f"rank 1 cannot wait for its neighbour at 127.0.0.1:{port}: Address already in use; its address is the one in the hostfile"
        with pytest.raises(NodesError, match=f"^{told}$"):
            name_ring(nodes, 1)


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', '[["127.0.0.1"], ["127.0.0.1"]]', "[[1], [2]]", None])
def test_a_hostfile_that_tells_nothing_is_too(text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if text is not None:
        (tmp_path / "ring.json").write_text(text)
    monkeypatch.setenv("MLX_RANK", "1")
    monkeypatch.setenv("MLX_HOSTFILE", str(tmp_path / "ring.json"))
    with pytest.raises(NodesError, match=r"^MLX_HOSTFILE: .*ring.json does not tell where rank 1 listens \(.*\); unset it$"):
        name_ring(Nodes((Host("127.0.0.1", 1), Host("127.0.0.1", 2))), 1)
