"""Sends rows between ranks by `mx.distributed`."""

from __future__ import annotations

import atexit
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile

import mlx.core as mx

from ..errors import GroupLostError, NodesError, one_line
from .control_channel import listen
from .nodes import Nodes

COORDINATOR = "MLX_JACCL_COORDINATOR"
"""Environment variable that is set if rows are sent by RDMA over Thunderbolt."""
JOIN_S = 60
"""Seconds within which the neighbours must have joined: all ranks start at the same moment."""


def name_ring(nodes: Nodes, rank: int) -> None:
    """Set MLX's variables for the neighbours, unless `mlx.launch` did. Raises `NodesError` if this rank cannot listen for them."""
    os.environ["MLX_RANK"] = str(rank)
    if COORDINATOR in os.environ:
        return
    if not os.environ.get("MLX_HOSTFILE"):
        with NamedTemporaryFile("w", suffix=".json", delete=False) as file:
            file.write(nodes.ring())
        os.environ["MLX_HOSTFILE"] = file.name
        atexit.register(os.unlink, file.name)
    # MLX listens only once all ranks have read their weights: find out now whether it can.
    for address, port in _places(os.environ["MLX_HOSTFILE"], rank):
        listen(address, port, f"rank {rank} cannot wait for its neighbour").close()


def _places(hostfile: str, rank: int) -> list[tuple[str, int]]:
    try:
        parts = [place.rpartition(":") for place in json.loads(Path(hostfile).read_text(encoding="utf-8"))[rank]]
        return [(address, int(port)) for address, _, port in parts]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise NodesError(f"MLX_HOSTFILE: {hostfile} does not tell where rank {rank} listens ({one_line(error)}); unset it") from None


class Ring:
    """Ring of ranks, for the thread that made it, as streams belong to threads.

    Sending and receiving have separate streams: a receive must not delay the send of the same or the next step.
    """

    def __init__(self) -> None:
        """Connect to the neighbours that MLX_RANK and MLX_HOSTFILE name, or the variables of JACCL that `mlx.launch` sets.

        Raises `GroupLostError`. After `JOIN_S` seconds SIGALRM ends the process, and its supervisor restarts it.
        """
        # MLX waits forever for a neighbour that died, and holds Python's lock: no thread could end the process.
        signal.alarm(JOIN_S)
        try:
            self._group = mx.distributed.init(strict=True, backend="jaccl" if COORDINATOR in os.environ else "ring")
        except RuntimeError as error:  # or a port was taken since this rank started
            raise GroupLostError(f"the ranks could not be joined: {one_line(error)}") from None
        finally:
            signal.alarm(0)
        self.rank, self.size = self._group.rank(), self._group.size()
        self._out, self._in, self._sums = (mx.new_stream(mx.cpu) for _ in range(3))  # type: ignore[arg-type]
        self.sent_bytes = 0
        """Bytes of rows that this rank has sent."""

    @property
    def next(self) -> int:
        """The rank that this one sends to."""
        return (self.rank + 1) % self.size

    def send(self, rows: mx.array) -> mx.array:
        """Send rows to the next rank once the returned array is evaluated."""
        self.sent_bytes += rows.nbytes
        return mx.distributed.send(rows, self.next, group=self._group, stream=self._out)

    def receive(self, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
        """Return the rows of the previous rank."""
        return mx.distributed.recv(shape, dtype, (self.rank - 1) % self.size, group=self._group, stream=self._in)

    def sum(self, rows: mx.array) -> mx.array:
        """Return the sum over all ranks."""
        self.sent_bytes += rows.nbytes * 2 * (self.size - 1) // self.size
        return mx.distributed.all_sum(rows, group=self._group, stream=self._sums)
