"""Remembers how fast the product kernels were on this machine, so that they are measured once and not at every load."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import threading
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx

if TYPE_CHECKING:
    from ..kernels_metal.quantized_matmul.trial import Speed, Subject


def remembered(file: Path | None, subject: Subject) -> dict[int, Speed] | None:
    """The speeds measured before on this machine with these versions of system, MLX and kernels, by rows of the variant; None where there
    are none, or the file cannot be read."""
    from ..kernels_metal.quantized_matmul.trial import Speed

    found = _read(file).get(subject.name)
    if not isinstance(found, dict) or set(found) != {str(rows) for rows in subject.rows}:
        return None
    try:
        return {int(rows): Speed(float(times), bool(stalled)) for rows, (times, stalled) in found.items()}
    except (TypeError, ValueError):
        return None


def remember(file: Path | None, subject: Subject, speeds: dict[int, Speed]) -> None:
    """Add to the file, and drop what other machines or versions have left there. A file that cannot be written is left alone."""
    if file is None:
        return
    known = _read(file) | {subject.name: {str(rows): [round(speed.times_mlx, 3), speed.stalled] for rows, speed in speeds.items()}}
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        fresh = file.with_name(f"{file.name}.{os.getpid()}.{threading.get_ident()}")
        fresh.write_text(json.dumps({"machine": machine(), "speeds": known}, indent=1), encoding="utf-8")
        fresh.replace(file)


def _read(file: Path | None) -> dict[str, object]:
    if file is None:
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    ours = isinstance(content, dict) and content.get("machine") == machine() and isinstance(content.get("speeds"), dict)
    return dict(content["speeds"]) if ours else {}


@cache
def machine() -> str:
    """What speeds depend on: the chip, the system, MLX, and the kernels' source."""
    from importlib.metadata import version  # takes long, and only a GPU needs it

    from ..kernels_metal.source import load

    codes, blocks = (f"quantized_matmul/{name}.metal" for name in ("quantized_matmul", "block_matmul"))
    sources = [load(codes, "affine_matmul"), load(codes, "mxfp4_matmul"), load(blocks, "block_matmul")]
    digest = hashlib.sha256("".join(s.header + s.body for s in sources).encode()).hexdigest()[:12]
    device = str(mx.device_info().get("device_name") or platform.machine())
    return f"{device}, {platform.system()} {platform.release()}, mlx {version('mlx')}, kernels {digest}"
