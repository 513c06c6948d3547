"""Faults that macOS reports for work of a GPU. MLX raises them as `[METAL] Command buffer execution failed: TEXT.`, `TEXT` from macOS."""

from __future__ import annotations

import re
from enum import Enum


class GpuFault(Enum):
    """Kinds of faults, by who can have caused them."""

    OTHERS = re.compile(r"Innocent ?Victim|victim of GPU|Submissions ?Ignored|Ignored \(", re.IGNORECASE)
    """Other work was aborted, and this work with it. No kernel of this step is guilty."""
    MEMORY = re.compile(r"malloc|memory", re.IGNORECASE)
    """Too little memory: plain MLX needs even more."""
    SLOW = re.compile(r"Time(d )?out|Impacting ?Interactivity|Hang\b", re.IGNORECASE)
    """The work took too long, or the GPU drew no window meanwhile."""
    OWN = re.compile(r"Address ?Fault|Page ?Fault|Invalid ?Resource|Stack ?Overflow|Access ?Revoked", re.IGNORECASE)
    """The work's own commands failed, and would fail again."""
    UNKNOWN = re.compile("")


def gpu_fault(error: BaseException) -> GpuFault | None:
    """Return the kind of fault if a GPU aborted work, else None."""
    text = str(error)
    if not isinstance(error, RuntimeError) or "Command buffer execution failed" not in text:
        return None
    return next(kind for kind in GpuFault if kind.value.search(text))
