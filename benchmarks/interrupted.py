"""How long a notebook's cell goes on after it was interrupted: in the middle of an answer, and while a long prompt is read.

A real Jupyter kernel runs the cell; the time is that from the interrupt to the kernel's word that it is idle again. For comparison: a
cell that only sleeps, which is what the kernel itself takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import monotonic, sleep
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jupyter_client.blocking.client import BlockingKernelClient
    from jupyter_client.manager import KernelManager

_LONG = "' '.join(f'{number} apples cost {number * number} francs.' for number in range(450))"
_CELLS = {
    "sleeping": "from time import sleep\ntry:\n    sleep(60)\nexcept KeyboardInterrupt:\n    pass",
    "an answer": "done = stream(llm, 'One, two, three,', SamplingParams(max_tokens=8000, ignore_eos=True))",
    "a prompt of {tokens} tokens": "done = stream(llm, long + str(number), SamplingParams(max_tokens=8))",
}
_WAITS = (0.5, 0.8, 1.1, 1.4, 1.7)
"""Seconds after which a cell is interrupted, in turns."""
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Interrupted:
    """One thing that was interrupted several times."""

    what: str
    """What the cell did."""
    seconds: tuple[float, ...]
    """From the interrupt until the kernel was idle."""
    cancelled: int
    """How many of the answers say that they were cancelled."""


def measure(model: str, times: int) -> list[Interrupted]:
    """Each cell `times` times. Needs ipykernel."""
    with _kernel() as (manager, client):
        _run(client, f"from mlxinfer import LLM, SamplingParams\nfrom mlxinfer.notebook import stream\nllm = LLM({model!r})")
        tokens = int(_run(client, f"long, number = {_LONG}, 0\nprint(len(llm.tokenizer.encode(long)))"))
        return [_interrupted(manager, client, what.format(tokens=f"{tokens:,}"), code, times) for what, code in _CELLS.items()]


def _interrupted(manager: KernelManager, client: BlockingKernelClient, what: str, code: str, times: int) -> Interrupted:
    seconds, cancelled = [], 0
    for number in range(times):
        _run(client, f"number, done = {number}, None")
        request = client.execute(code)
        sleep(_WAITS[number % len(_WAITS)])
        began = monotonic()
        manager.interrupt_kernel()
        _until_idle(client, request)
        seconds.append(monotonic() - began)
        cancelled += _run(client, "print(done is not None and done.finish_reason == 'cancelled' and llm.stats().running == 0)") == "True"
    return Interrupted(what, tuple(seconds), cancelled)


def table(model: str, found: list[Interrupted]) -> str:
    """Markdown."""
    lines = [f"{model}, {len(found[0].seconds)} times each", "", "| interrupted | ms, median | most | answers kept as cancelled |"]
    lines.append("| --- | ---: | ---: | ---: |")
    for each in found:
        kept = "" if each is found[0] else f"{each.cancelled} of {len(each.seconds)}"
        lines.append(f"| {each.what} | {1e3 * median(each.seconds):.0f} | {1e3 * max(each.seconds):.0f} | {kept} |")
    return "\n".join(lines) + "\n"


def _run(client: BlockingKernelClient, code: str) -> str:
    return _until_idle(client, client.execute(code))


def _until_idle(client: BlockingKernelClient, request: str) -> str:
    """What a cell has printed. Raises `RuntimeError` with the error that it ended with."""
    printed = ""
    while True:
        message = client.get_iopub_msg(timeout=_TIMEOUT_S)
        if message["parent_header"].get("msg_id") != request:
            continue
        kind, content = message["msg_type"], message["content"]
        if kind == "error":
            raise RuntimeError(f"{content['ename']}: {content['evalue']}")
        if kind == "stream" and content["name"] == "stdout":
            printed += content["text"]
        if kind == "status" and content["execution_state"] == "idle":
            return printed.strip()


@contextmanager
def _kernel() -> Iterator[tuple[KernelManager, BlockingKernelClient]]:
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel()
    try:
        yield manager, client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
