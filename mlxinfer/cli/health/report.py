"""`mlxinfer doctor --report`: everything about a machine that helps to find out why something fails or is slow there, in one file.

The file says nothing about whose machine it is, and contains no prompt: see `private.py`.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx

from ...cache.attention.select import attention_lines
from ...cache.kv_format import KVFormat
from ...errors import MLXInferError
from ...loading.find.catalog import local_models
from ...loading.load import meta_model
from ...util.device import is_gpu, memory_limit, wired_limit
from ..common.console import human_bytes
from .diagnosis import Diagnosis, diagnose, diagnose_model
from .private import settings_of, without_private

_FORMATS = ("16", "8", "4")
_DEMO = "smollm2"
_FAILURES = (
    *(MLXInferError, ArithmeticError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError),
    subprocess.SubprocessError,
)
"""What a part may end with: everything but being interrupted, and running out of memory."""
_SYSTEM_SECONDS = 20.0
"""The longest that a question to the system may take."""


_TITLE = "# mlxinfer doctor\n"


def is_report(file: Path) -> bool:
    """Whether this file was written by an earlier call, and may be replaced."""
    try:
        with file.open("rb") as opened:
            return opened.read(len(_TITLE)) == _TITLE.encode()
    except OSError:
        return False


def report(model: str | None) -> str:
    """Markdown. `model` is the one to load and to measure; None takes SmolLM2 if it is installed. A part that fails says why."""
    chosen = model or (_DEMO if any(found.name == _DEMO for found in local_models()) else None)
    look = cache(diagnose)  # which measures products on a GPU
    parts: list[tuple[str, Callable[[], Iterator[str]]]] = [
        ("machine", lambda: _machine(look())),
        ("versions", lambda: _versions(look())),
        ("memory", lambda: _memory(look())),
        ("settings", _settings),
        ("server", _server),
        ("attention", lambda: _attention(chosen)),
        ("plan", lambda: _plan(chosen)),
        ("speed", lambda: _speed(chosen)),
    ]
    text = _TITLE
    for title, lines in parts:
        text += f"\n## {title}\n\n" + "".join(f"- {line}\n" for line in _safely(lines))
    return without_private(text)


def _safely(lines: Callable[[], Iterator[str]]) -> Iterator[str]:
    """A report is wanted most where something is broken, so no part may prevent the others."""
    try:
        yield from lines()
    except _FAILURES as error:
        yield f"not found out: {type(error).__name__}: {' '.join(str(error).split())[:500]}"


def _machine(found: Diagnosis) -> Iterator[str]:
    yield f"device: {found.device}"
    yield f"processors: {os.cpu_count()}"
    yield f"GPU cores: {_gpu_cores()}"
    yield f"kernels: {found.gpu_kernels or found.cpu_kernels}"
    yield from found.gpu_products
    yield f"computes in: {found.compute_dtype}"
    if found.float32:
        yield found.float32
    for name, value in sorted(mx.device_info().items()):
        yield f"MLX, {name}: {value}"


def _gpu_cores() -> str:
    """As macOS counts them; MLX does not know."""
    if sys.platform != "darwin":
        return "not known"
    command = ["system_profiler", "SPDisplaysDataType", "-json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SYSTEM_SECONDS, check=True)
    cards: list[dict[str, Any]] = json.loads(done.stdout)["SPDisplaysDataType"]
    return ", ".join(str(card["sppci_cores"]) for card in cards if "sppci_cores" in card) or "not known"


def _versions(found: Diagnosis) -> Iterator[str]:
    system = platform.mac_ver()[0]
    yield f"system: macOS {system}" if system else f"system: {platform.system()} {platform.release()}"
    yield f"architecture: {platform.machine()}"
    for name, version in found.versions.items():
        if name != "system":
            yield f"{name}: {version or 'not installed'}"


def _memory(found: Diagnosis) -> Iterator[str]:
    yield f"limit: {human_bytes(found.memory_bytes)} ({found.memory_source}), {human_bytes(found.usable_bytes)} for weights and cache"
    yield f"physical: {human_bytes(os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES'))}, allowed {human_bytes(memory_limit()[0])}"
    if is_gpu():
        yield f"wired at most: {human_bytes(wired_limit())}"
        yield f"in use by MLX: {human_bytes(mx.get_active_memory())}, kept for reuse {human_bytes(mx.get_cache_memory())}"
    if found.packed_copies:
        yield found.packed_copies


def _settings() -> Iterator[str]:
    found = settings_of(os.environ)
    if not found:
        yield "no variable of MLX or mlxinfer is set"
    yield from (f"{name}={value}" for name, value in found.items())


def _server() -> Iterator[str]:
    from ...server.access.launchd import LABEL
    from ...server.settings import default_socket

    path = default_socket().expanduser().absolute()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield f"socket: {path}, {len(os.fsencode(path))} bytes"
    yield f"its directory: {_directory(path.parent)}"
    yield f"a socket there: {_socket_in(path.parent)}"
    yield f"open files: {soft} of {hard}"
    if sys.platform == "darwin":
        agents = Path.home() / "Library" / "LaunchAgents"
        yield f"launchd: {_directory(agents)}; {LABEL}.plist {'is there' if (agents / f'{LABEL}.plist').exists() else 'is not there'}"
    else:
        yield "launchd: there is none"


def _directory(path: Path) -> str:
    if not path.is_dir():
        return "missing"
    found = path.stat()
    owner = "own" if found.st_uid == os.geteuid() else "of another user"
    return f"{owner}, mode {stat.S_IMODE(found.st_mode):04o}, {'writable' if os.access(path, os.W_OK) else 'not writable'}"


def _socket_in(directory: Path) -> str:
    """Whether one can be made: it is, and removed again."""
    if not directory.is_dir():
        return "not tried, as its directory is missing"
    place = directory / f"try{os.getpid()}.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            listener.bind(str(place))
            listener.listen(1)
        except OSError as error:
            return f"fails: {error.strerror or error}"
        finally:
            place.unlink(missing_ok=True)
    return "can be made"


def _attention(model: str | None) -> Iterator[str]:
    """What attends in each layer, for each width of the cache: with which kernels, or why not."""
    if model is None:
        yield f"no model: install {_DEMO}, or name one"
        return
    found = meta_model(model)
    yield f"{_public(model)}: {found.model_type}"
    if found.borrowed:
        yield "runs on mlx-lm's own graph"
        return
    for bits in _FORMATS:
        for line in attention_lines(found.model.layers, KVFormat.parse(bits), found.dtype):
            yield f"kv {bits}: {line}"


def _plan(model: str | None) -> Iterator[str]:
    if model is None:
        return
    for title, lines in diagnose_model(model, "16", False).sections():
        if title == "memory":
            yield from lines


def _speed(model: str | None) -> Iterator[str]:
    """A short measurement, on the way that every request takes."""
    if model is None:
        return
    from ...bench.machine import measure_machine
    from ...bench.measure import Workload, measure
    from ...engine.llm import LLM

    short = Workload(prefill=(128, 512), depths=(0, 1024), batches=(1,), repeat=3, steps=16, max_seconds=20)
    try:
        llm = LLM(model, speculate=False, prefix_cache=False)
    except MLXInferError as error:
        yield f"{_public(model)} does not load: {error}"
        return
    with llm:
        yield f"{_public(model)}: {human_bytes(llm.weight_bytes)} of weights, computed in {str(llm.dtype).rpartition('.')[2]}"
        for row in measure(llm, short, lambda _: None):
            yield f"{row.name}: {row.left_out or f'{row.rate:.1f} tokens/s ({min(row.rates):.1f} to {max(row.rates):.1f})'}"
        machine = measure_machine(llm.weight_bytes)
    yield f"reads {human_bytes(machine.read_bytes)}/s, copies {human_bytes(machine.copy_bytes)}/s"
    yield f"{machine.operations / 1e9:.0f} GFLOP/s in {machine.operations_dtype}"


def _public(model: str) -> str:
    """A model's name without the directories it lies in."""
    return Path(model).name if os.path.exists(os.path.expanduser(model)) else model
