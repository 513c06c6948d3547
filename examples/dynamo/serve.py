"""Dynamo's frontend and two mlxinfer workers on this machine, found by files: no etcd, no NATS.

    pip install pyzmq msgspec ai-dynamo uvloop
    python examples/dynamo/serve.py path/to/model --name tiny

The frontend listens on port 8000 and sends each prompt where its beginning is cached, by the workers' KV events, which go through the two
ports after it. Ctrl-C ends all three.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory

WAIT_S = 120
BLOCK = 64


def served(port: int) -> list[str]:
    """The models that the frontend knows, none before it answers."""
    connection = HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/v1/models")
        return [model["id"] for model in json.loads(connection.getresponse().read())["data"]]
    except (OSError, HTTPException, ValueError, KeyError):
        return []
    finally:
        connection.close()


def start(model: str, name: str, port: int, folder: str, options: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """The frontend and both workers, which find each other by files in `folder`."""
    environment = os.environ | {"DYN_FILE_KV": folder, "DYN_DISCOVERY_BACKEND": "file"}
    routing = ["--router-mode", "kv", "--kv-cache-block-size", str(BLOCK), "--event-plane", "zmq", "--discovery-backend", "file"]
    frontend = [sys.executable, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port), *routing]
    worker = [sys.executable, str(Path(__file__).with_name("worker.py")), model, "--name", name, *options]
    commands = [frontend, *([*worker, "--kv-events", f"tcp://127.0.0.1:{port + 1 + i}"] for i in range(2))]
    for command in commands:
        yield subprocess.Popen(command, env=environment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--name")
    parser.add_argument("--port", type=int, default=8000, help="the frontend's; events of the workers have the two after it")
    parser.add_argument("--memory", help="GB for each worker")
    given = parser.parse_args()
    name = given.name or Path(given.model).name
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the others too, whenever it comes
    with TemporaryDirectory() as folder:
        running: list[subprocess.Popen[bytes]] = []
        try:
            with suppress(KeyboardInterrupt):
                running.extend(start(given.model, name, given.port, folder, ["--memory", given.memory] if given.memory else []))
                deadline = time.monotonic() + WAIT_S
                while name not in served(given.port):
                    if any(process.poll() is not None for process in running) or time.monotonic() > deadline:
                        sys.exit("the frontend does not list the model")
                    time.sleep(0.5)
                print(f"ready: http://127.0.0.1:{given.port}/v1", flush=True)
                signal.pause()
        finally:
            for process in reversed(running):
                process.terminate()
            for process in running:
                process.wait()


if __name__ == "__main__":
    main()
