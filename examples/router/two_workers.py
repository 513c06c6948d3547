"""Two servers of one model behind a router that sends each conversation where its beginning is cached.

    pip install smg
    python examples/router/two_workers.py smollm2

The router is SMG (https://github.com/lightseekorg/smg). It listens on port 30000, the workers on the two after it; Ctrl-C ends all three.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from http.client import HTTPConnection, HTTPException

WAIT_S = 120


def healthy(port: int, path: str = "/health") -> bool:
    """Whether the server at this port answers with 200."""
    connection = HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def wait_for(process: subprocess.Popen[bytes], port: int, path: str = "/health") -> None:
    """Wait until a server is ready. Exits if its process has ended, or takes too long."""
    deadline = time.monotonic() + WAIT_S
    while not healthy(port, path):
        if process.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"nothing answers at port {port}")
        time.sleep(0.1)


def worker(model: str, port: int, *options: str) -> subprocess.Popen[bytes]:
    """A server that stays for a second after SIGTERM, with a health that says so: the router looks more often than that."""
    command = ["-m", "mlxinfer", "serve", model, "--no-socket", "--port", str(port), "--drain", "1.5", *options]
    return subprocess.Popen([sys.executable, *command])


def router(port: int, workers: Sequence[int], policy: str = "cache_aware") -> subprocess.Popen[bytes]:
    """SMG before these ports. A worker is out after one failed health check and back after one good one. How busy each is decides where a
    new conversation begins, and is asked every second: with SMG's 10 most of them would begin on one worker."""
    checks = ["--health-check-interval-secs", "1", "--health-failure-threshold", "1", "--health-success-threshold", "1"]
    checks += ["--load-monitor-interval", "1"]
    urls = [f"http://127.0.0.1:{each}" for each in workers]
    own = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(port + 9), "--log-level", "warn"]
    return subprocess.Popen([sys.executable, "-m", "smg", "launch", "--policy", policy, *own, *checks, "--worker-urls", *urls])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--port", type=int, default=30000, help="the router's; the workers have the two after it")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the others too, whenever it comes
    ports = [given.port + 1, given.port + 2]
    running: list[subprocess.Popen[bytes]] = []
    try:
        with suppress(KeyboardInterrupt):
            running.extend(worker(given.model, port) for port in ports)
            for process, port in zip(running, ports, strict=True):
                wait_for(process, port)
            running.append(router(given.port, ports))
            wait_for(running[-1], given.port, "/v1/models")
            print(f"ready: http://127.0.0.1:{given.port}/v1", flush=True)
            signal.pause()
    finally:
        for process in reversed(running):
            process.terminate()
        for process in running:
            process.wait()


if __name__ == "__main__":
    main()
