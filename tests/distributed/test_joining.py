"""A rank whose neighbour dies while the ring is made."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from support.pair import free_port

_JOINS_ALONE = """
import sys
from mlxinfer.distributed import ring
from mlxinfer.distributed.nodes import Node, Nodes
ring.JOIN_S = 1
port, rank = int(sys.argv[1]), int(sys.argv[2])
ring.name_ring(Nodes((Node("127.0.0.1", port), Node("127.0.0.1", port + 1))), rank)
print("joining", flush=True)
ring.Ring()
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_it_does_not_wait_for_ever(rank: int) -> None:
    done = subprocess.run([sys.executable, "-c", _JOINS_ALONE, str(free_port()), str(rank)], timeout=60, check=False, capture_output=True)
    assert (done.stdout, done.returncode) == (b"joining\n", -signal.SIGALRM)
