"""Runs `mlxinfer serve --nodes`: one model on several machines. The command on each machine starts a worker process."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from ..config import EngineArgs
    from ..distributed.group import Group
    from ..distributed.group_llm import GroupLLM
    from ..distributed.nodes import Nodes
    from ..server.settings import ServerSettings

_LAST_WORDS_S = 0.5
"""Seconds for clients to read the end of their answers before the process exits."""


def serve_on_nodes(
    model: str, hostfile: Path, rank: int | None, settings: ServerSettings, aliases: dict[str, str], options: dict[str, Any], split: str
) -> None:
    """Run this machine's rank until the group ends; without a rank, start all ranks by `mlx.launch`. Raises `MLXInferError`."""
    from ..config import EngineArgs
    from ..distributed.nodes import read_nodes
    from ..distributed.supervise import child_descriptors, end_with_supervisor, say_ready
    from ..errors import NodesError
    from ..server.model_manager.registry import public_name

    nodes = read_nodes(hostfile)
    if rank is None:
        _launch(hostfile)
        return
    if not 0 <= rank < len(nodes):
        raise NodesError(f"--rank {rank}: the hostfile has the ranks 0 to {len(nodes) - 1}")
    descriptors = child_descriptors()
    if descriptors is not None:
        end_with_supervisor()
    name, path = public_name(model)
    if descriptors is None:
        _supervise(settings if rank == 0 else None)
    elif rank:
        from ..distributed.ring import name_ring
        from ..distributed.worker_process import run_worker

        name_ring(nodes, rank)
        run_worker(path, nodes, rank, options.get("memory_gb"), lambda: say_ready(descriptors[0]), adapters=options.get("adapters"))
        os._exit(0)  # threads of the ring wait for one another
    else:
        _serve(name, EngineArgs(path, **options), nodes, settings, aliases, descriptors, split)


def _launch(hostfile: Path) -> None:
    """Replace this process by `mlx.launch`, which starts this command on all machines."""
    from ..distributed.supervise import own_command
    from ..errors import NodesError

    program = shutil.which("mlx.launch") or str(Path(sys.executable).with_name("mlx.launch"))
    if not os.access(program, os.X_OK):
        raise NodesError("mlx.launch is missing, which starts the ranks: install MLX, or run this on each machine with --rank N")
    os.execv(program, [program, "--backend", "ring", "--hostfile", str(hostfile), "--", *own_command()])


def _supervise(settings: ServerSettings | None) -> None:
    """Restart this machine's worker process when needed; rank 0's supervisor also owns the server's sockets."""
    from contextlib import ExitStack

    from ..distributed.supervise import Supervisor, own_command
    from ..server.access.sockets import listening

    with ExitStack() as stack:
        sockets = [] if settings is None else stack.enter_context(listening(settings))
        status = Supervisor(own_command(), sockets).run()
    if status:
        sys.exit(status)


def _serve(
    name: str, args: EngineArgs, nodes: Nodes, settings: ServerSettings, aliases: dict[str, str], descriptors: list[int], split: str
) -> None:
    from socket import socket
    from threading import Timer

    from ..distributed.group import Group
    from ..distributed.group_llm import GroupLLM
    from ..distributed.ring import name_ring
    from ..distributed.supervise import say_ready
    from ..errors import GroupLostError
    from ..server.access.sockets import Listeners
    from ..server.model_manager.model_slot import ModelSlot
    from ..server.model_manager.registry import Registry
    from ..server.process import ServerModels, run

    name_ring(nodes, 0)
    group = Group(nodes, split=split)
    group.on_loss(lambda reason: Timer(_LAST_WORDS_S, os._exit, (GroupLostError.exit_code,)).start())
    pipe, *numbers = descriptors
    llm = GroupLLM.joined(group, args)
    try:
        asyncio.run(llm.ready())
    except (SystemExit, KeyboardInterrupt):
        os._exit(0)  # the thread waiting for other machines cannot be interrupted
    try:
        sockets = Listeners(lambda: None)
        sockets += [socket(fileno=number) for number in numbers]

        def tell(line: str) -> None:
            click.echo(line)
            say_ready(pipe)

        run(ServerModels(registry=Registry({name: ModelSlot.running(llm)}, aliases)), settings, tell=tell, sockets=sockets)
    finally:
        _close(llm, group)


def _close(llm: GroupLLM, group: Group) -> None:
    """Close together with the other ranks; another signal does not wait for the running step."""
    import signal

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        asyncio.run(llm.close())
    except KeyboardInterrupt:
        group.close()
        os._exit(0)
