"""How much memory the system lets this process have: physical memory, control groups, resource limits. Imports nothing heavy."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePosixPath

_PROC = Path("/proc/self")
_RESOURCES = (("address space", resource.RLIMIT_AS, "VmSize"), ("data", resource.RLIMIT_DATA, "VmData"))


def memory_limit(proc: Path = _PROC) -> tuple[int, str]:
    """The least of all limits in bytes, and which one it is."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([(physical, "physical memory"), *cgroup_limits(proc), *_resource_limits()])


def cgroup_limits(proc: Path = _PROC) -> Iterator[tuple[int, str]]:
    """Those of the process's own control group and of every one above it, of both versions; nothing where there are none."""
    try:
        groups = (proc / "cgroup").read_text(encoding="utf-8").splitlines()
        mounts = (proc / "mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        names = ("memory.limit_in_bytes",) if controllers else ("memory.max", "memory.high")
        for folder in _folders(mounts, "memory" if controllers else None, path):
            for name in names:
                limit = _number(folder / name)
                if limit is not None:
                    yield limit, f"control group, {name}"


def _folders(mounts: list[str], controller: str | None, path: str) -> Iterator[Path]:
    """Where the files of a group and of its parents are, in the mounts of its hierarchy (`controller` None is version 2)."""
    for line in mounts:
        before, _, after = line.partition(" - ")
        kind, _, options = (*after.split(" "), "", "", "")[:3]
        root, mount = before.split(" ")[3:5]
        right = kind == "cgroup2" if controller is None else kind == "cgroup" and controller in options.split(",")
        if not right:
            continue
        # What is mounted may begin below the hierarchy's root; a path outside of it means that only the mount itself can be seen.
        own, top = PurePosixPath(path), PurePosixPath(root)
        inner = own.relative_to(top) if own.is_relative_to(top) else PurePosixPath()
        folder = Path(mount) / inner
        yield folder
        yield from (parent for parent in folder.parents if parent.is_relative_to(mount))


def _number(file: Path) -> int | None:
    try:
        text = file.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _resource_limits() -> Iterator[tuple[int, str]]:
    for name, kind, field in _RESOURCES:
        soft = resource.getrlimit(kind)[0]
        if soft != resource.RLIM_INFINITY:
            yield max(soft - _held_at_first(field), 0), f"resource limit of {name}"


@cache
def _held_at_first(field: str) -> int:
    """What the process had when this was first asked, before a model: a plan counts the model itself."""
    try:
        lines = (_PROC / "status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), 0)
