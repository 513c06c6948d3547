"""A real Jupyter kernel, and what its front end would see."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jupyter_client.blocking.client import BlockingKernelClient
    from jupyter_client.manager import KernelManager


PATIENCE_S = 5.0


class Cell:
    """Runs code in a kernel and collects what the front end would see."""

    def __init__(self, manager: KernelManager, client: BlockingKernelClient) -> None:
        self.manager, self.client = manager, client
        self.displays: dict[str, dict[str, str]] = {}
        self.printed = ""

    def run(self, code: str, interrupt_after: int | None = None) -> str:
        """Execute, interrupting once a display has so many characters. Returns what was printed; a traceback fails.

        An exception that Python raises inside a finalizer is lost, and so is an interrupt: answers that go on are interrupted again, as
        somebody would who presses the button.
        """
        self.printed, sent = "", float("-inf")
        request = self.client.execute(code)
        while True:
            message = self.client.get_iopub_msg(timeout=60)
            if message["parent_header"].get("msg_id") != request:
                continue
            kind, content = message["msg_type"], message["content"]
            assert kind != "error", "\n".join(content["traceback"])
            if kind == "stream":
                self.printed += content["text"]
            if kind in ("display_data", "update_display_data"):
                self.displays[content["transient"]["display_id"]] = content["data"]
                enough = interrupt_after is not None and len(content["data"]["text/plain"]) >= interrupt_after
                if enough and "stopped" not in str(content["data"]) and time.monotonic() - sent > PATIENCE_S:
                    self.manager.interrupt_kernel()
                    sent = time.monotonic()
            if kind == "status" and content["execution_state"] == "idle":
                return self.printed.strip()

    @property
    def last_display(self) -> dict[str, str]:
        return list(self.displays.values())[-1]


@contextmanager
def notebook_kernel() -> Iterator[Cell]:
    """A new kernel, which ends with the block."""
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel()
    try:
        yield Cell(manager, client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
