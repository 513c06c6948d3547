"""The file in which passed trials of kernels are kept, so that a later process on the same machine does not repeat them.

`kernel_trials.json` in the cache directory belongs to one machine, with one version of system, MLX and kernels. Each kernel has a digest of
the code of its trial, and one entry for each kind that passed. A file that cannot be read, or that belongs to another machine or version,
is as good as none, and is replaced by the next entry. Writing never fails aloud: an entry that is lost costs another trial.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..util.cache_dir import cache_dir
from ..util.device import device_info
from ..util.plain_file import read_plain
from . import executors

_MOST_BYTES = 4 << 20
_LOCK_TRIES, _LOCK_PAUSE = 50, 0.01
"""Attempts to lock the file, and seconds between them. Others hold the lock for milliseconds, unless they are suspended."""
_SOURCES = (".py", ".metal", ".h", ".cuh")
_afresh: ContextVar[bool] = ContextVar("trials are repeated", default=False)


def trials_file() -> Path | None:
    """Return the file of this process; None if trials are not kept."""
    return cache_dir() / "kernel_trials.json"


@contextlib.contextmanager
def tried_afresh() -> Iterator[None]:
    """Within the context, kernels are tried although their trials are kept."""
    token = _afresh.set(True)
    try:
        yield
    finally:
        _afresh.reset(token)


def repeated() -> bool:
    """Return True within `tried_afresh`."""
    return _afresh.get()


def kept(trial: str, check: Callable[..., object], kind: object) -> Mapping[str, Any] | None:
    """Return the entry of a kind that passed this trial, or None. `check` is the trial's function."""
    file = trials_file() if executors.kind() else None
    if file is None:
        return None
    entry = _kinds(_read(file), trial, check).get(repr(kind))
    return entry if isinstance(entry, dict) else None


def keep(trial: str, check: Callable[..., object], kind: object, entry: Mapping[str, Any]) -> None:
    """Keep the entry of a kind that passed."""
    _change(trial, check, lambda kinds: kinds | {repr(kind): dict(entry)})


def drop(trial: str, check: Callable[..., object], kinds: Collection[object]) -> None:
    """Remove the entries of these kinds."""
    names = {repr(kind) for kind in kinds}
    if any(kept(trial, check, kind) for kind in kinds):
        _change(trial, check, lambda known: {name: entry for name, entry in known.items() if name not in names})


def _change(trial: str, check: Callable[..., object], change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    file = trials_file() if executors.kind() else None
    if file is None:
        return
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with _locked(file.with_name(f"{file.name}.lock")):
            trials = _read(file)
            before = _kinds(trials, trial, check)
            after = change(before)
            if after == before:
                return
            trials |= {trial: {"source": _digest_of_trial(check), "kinds": after}}
            fresh = file.with_name(f"{file.name}.{os.getpid()}.{threading.get_ident()}")
            try:
                fresh.write_text(json.dumps({"machine": machine(), "trials": trials}, indent=1), encoding="utf-8")
                fresh.replace(file)
            finally:
                fresh.unlink(missing_ok=True)


def _read(file: Path) -> dict[str, Any]:
    """Return the trials in the file, by name; {} unless it belongs to this machine."""
    try:
        content = json.loads(read_plain(file, _MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    ours = isinstance(content, dict) and content.get("machine") == machine() and isinstance(content.get("trials"), dict)
    return dict(content["trials"]) if ours else {}


def _kinds(trials: Mapping[str, Any], trial: str, check: Callable[..., object]) -> dict[str, Any]:
    """Return the entries of a trial, by kind; {} if its code has changed."""
    found = trials.get(trial)
    same = isinstance(found, dict) and found.get("source") == _digest_of_trial(check) and isinstance(found.get("kinds"), dict)
    return dict(found["kinds"]) if same and found else {}


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold the lock that keeps parallel processes from losing one another's entries. Another's lock is not awaited for longer than half a
    second. Raises OSError."""
    import fcntl  # only who writes needs it

    lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        for _ in range(_LOCK_TRIES):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_LOCK_PAUSE)
        yield
    finally:
        os.close(lock)


def machine() -> str:
    """Return the conditions of a trial: chip, system, MLX, executor and the kernels with their launchers."""
    return _machine(executors.kind())


@cache
def _machine(executor: str) -> str:
    from importlib.metadata import version  # slow to import

    device = str(device_info().get("device_name") or platform.machine())
    # The wheels of one version differ in their Metal kernels.
    library = Path(str(mx.__file__)).parent / "lib" / "mlx.metallib"
    size = f" ({library.stat().st_size})" if library.exists() else ""
    own = Path(__file__).parent
    digest = _digest(path for path in own.rglob("*") if executor == "emulator" or own / "emulator" not in path.parents)
    return f"{device}, {platform.system()} {platform.release()}, mlx {version('mlx')}{size}, {executor}, kernels {digest}"


@cache
def _digest_of_trial(check: Callable[..., object]) -> str:
    """Return a digest of the folder with a trial's code, its parameters included."""
    code = getattr(check, "__code__", None)
    return _digest(Path(code.co_filename).parent.iterdir()) if code else ""


def _digest(files: Iterable[Path]) -> str:
    """Return a digest of the source files among these."""
    total = hashlib.sha256()
    for file in sorted(path for path in files if path.suffix in _SOURCES):
        total.update(f"{file.name}\n".encode() + file.read_bytes())
    return total.hexdigest()[:12]
