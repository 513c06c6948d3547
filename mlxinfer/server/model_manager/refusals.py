"""What a client is told when a model cannot be had."""

from __future__ import annotations

import math
import re
import time
from pathlib import Path

from ..errors import APIError
from .model_slot import Slot

_PATH = re.compile(r"(?<![\w.])(?:~|\.{1,2})?(?:/[^\s/:,;'\"()]+)+/?")
_RETRY_S = 5
"""Seconds after which those may try again for whom the queue was too long."""


def not_loaded(slot: Slot) -> APIError:
    """503: the model could not be loaded, and may be tried again when its back-off is over."""
    left_s = slot.retry_at - time.monotonic()
    message = f"The model {slot.name!r} could not be loaded: {reason_of(slot)}"
    return APIError(503, "overloaded", message, param="model", code="model_not_loaded", retry_s=max(math.ceil(left_s), 1))


def too_many_waiting(slot: Slot) -> APIError:
    """503: as many requests wait for the model already as may."""
    message = f"{len(slot.waiting)} requests wait already for {slot.name!r} to be loaded: try again later."
    return APIError(503, "overloaded", message, param="model", code="too_many_waiting", retry_s=_RETRY_S)


def reason_of(slot: Slot) -> str:
    """Why a model is not there, in words for clients, who are not told where files are. The folder of the model and that of its adapters
    are known, which matters where their names have spaces."""
    reason = str(slot.failure or slot.unreadable or "its engine has ended")
    known = [] if slot.args is None else [slot.args.path_or_id, *(slot.args.adapters or {}).values()]
    for folder in sorted({str(place.parent) for one in known for place in _places(one)}, key=len, reverse=True):
        if folder not in ("/", "."):
            reason = reason.replace(f"{folder}/", "")
    return without_paths(reason)


def _places(path: str | Path) -> tuple[Path, Path]:
    given = Path(path).expanduser().absolute()
    return given, given.resolve()


def without_paths(message: str) -> str:
    """The message with the last parts of paths only. Where a path ends is guessed: at a space, for one."""
    return _PATH.sub(lambda found: found[0].rstrip("/").rpartition("/")[2], message)
