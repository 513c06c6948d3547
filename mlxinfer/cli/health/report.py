"""Report of `mlxinfer doctor --report`: one file about a machine for finding faults and slowness.

The file does not identify the machine's owner and has no prompts.
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
from textwrap import indent
from typing import Any

import mlx.core as mx

from ...cache.attention.select import attention_lines
from ...cache.kv_format import KVFormat
from ...errors import MLXInferError
from ...kernels_metal.kept_trials import tried_afresh
from ...kernels_metal.kernel_trial import failed_trials
from ...loading.find.catalog import local_models
from ...loading.load import meta_model
from ...util.device import device_info, is_gpu, memory_limit, no_device_lines
from ...util.mac import thermal_lines
from ...util.private_text import settings_of, without_private
from ..common.console import human_bytes
from .diagnosis import WIDTHS, Diagnosis, diagnose, diagnose_model

_DEMO = "smollm2"
_FAILURES = (
    *(MLXInferError, ArithmeticError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError),
    subprocess.SubprocessError,
)
"""Errors that a part of the report may raise: all but interrupts and lack of memory."""
_SYSTEM_SECONDS = 20.0
"""Maximum seconds of a system command."""
_TITLE = "# mlxinfer doctor\n"


def is_report(file: Path) -> bool:
    """Return True for a report of an earlier call, which may be replaced."""
    try:
        with file.open("rb") as opened:
            return opened.read(len(_TITLE)) == _TITLE.encode()
    except OSError:
        return False


@tried_afresh()
def report(model: str | None) -> str:
    """Return the report in Markdown. `model` is measured; None means SmolLM2 if installed. A failed part has its error."""
    chosen = model or (_DEMO if any(found.name == _DEMO for found in local_models()) else None)
    machine = cache(diagnose)  # measures products on a GPU
    parts: dict[str, Callable[[], Iterator[str]]] = {
        "machine": lambda: _machine(machine()),
        "versions": lambda: _versions(machine()),
        "memory": lambda: _memory(machine()),
        "settings": _environment_settings,
        "server": _server,
        "attention": lambda: _attention(chosen) if chosen else iter([f"no model: install {_DEMO}, or name one"]),
        "plan": lambda: diagnose_model(chosen, "16", False).memory_lines() if chosen else iter(()),
        "speed": lambda: _speed(chosen) if chosen else iter(()),
        "errors of kernels": _kernel_errors,
    }
    text = _TITLE
    for title, lines in parts.items():
        text += f"\n## {title}\n\n" + "".join(f"- {line}\n" for line in _safely(lines))
    return without_private(text)


def _safely(lines: Callable[[], Iterator[str]]) -> Iterator[str]:
    """Yield a part's lines, or its error: a broken part must not prevent the others."""
    try:
        yield from lines()
    except _FAILURES as error:
        yield f"unknown: {type(error).__name__}: {' '.join(str(error).split())[:500]}"


def _machine(found: Diagnosis) -> Iterator[str]:
    yield f"device: {found.device}"
    yield from no_device_lines()
    yield f"processors: {os.cpu_count()}"
    yield f"GPU cores: {_gpu_cores()}"
    yield f"kernels: {found.gpu_kernels or found.cpu_kernels}"
    yield from (*found.gpu_choices, *found.gpu_products)
    yield f"computes in: {found.compute_dtype}"
    if found.float32:
        yield found.float32
    named = {"matrix units": found.matrix_units, "command buffers": found.command_buffers, "power": found.power}
    yield from (f"{name}: {text}" for name, text in named.items() if text)
    yield from (f"temperature: {line}" for line in thermal_lines())
    for name, value in sorted(device_info().items()):
        yield f"MLX, {name}: {value}"


def _gpu_cores() -> str:
    """Return the number of GPU cores by macOS, which MLX does not report."""
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
    if found.wired:
        yield found.wired
    if is_gpu():
        yield f"in use by MLX: {human_bytes(mx.get_active_memory())}, kept for reuse {human_bytes(mx.get_cache_memory())}"
    if found.packed_copies:
        yield found.packed_copies


def _environment_settings() -> Iterator[str]:
    yield from [f"{name}={value}" for name, value in settings_of(os.environ).items()] or ["no variable of MLX or mlxinfer is set"]


def _server() -> Iterator[str]:
    from ...server.access.launchd import LABEL
    from ...util.cache_dir import default_socket

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
        yield "launchd: none"


def _directory(path: Path) -> str:
    if not path.is_dir():
        return "missing"
    found = path.stat()
    owner = "own" if found.st_uid == os.geteuid() else "of another user"
    return f"{owner}, mode {stat.S_IMODE(found.st_mode):04o}, {'writable' if os.access(path, os.W_OK) else 'not writable'}"


def _socket_in(directory: Path) -> str:
    """Create and remove a socket, and return the result."""
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


def _attention(model: str) -> Iterator[str]:
    """Yield the attention kernels of each layer for each cache width."""
    found = meta_model(model)
    yield f"{_public(model)}: {found.model_type}"
    if found.borrowed:
        yield "runs on mlx-lm's own graph"
        return
    for bits in WIDTHS:
        for line in attention_lines(found.model.layers, KVFormat.parse(bits), found.dtype):
            yield f"kv {bits}: {line}"


def _speed(model: str) -> Iterator[str]:
    """Yield a short measurement through the normal path of requests."""
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


def _kernel_errors() -> Iterator[str]:
    """Yield the whole text of what the trials of kernels raised so far."""
    for kernel, error in failed_trials():
        yield f"{kernel}:\n\n" + indent(f"```\n{error.strip()}\n```", "  ")


def _public(model: str) -> str:
    """Return a model's name without its directories."""
    return Path(model).name if os.path.exists(os.path.expanduser(model)) else model
