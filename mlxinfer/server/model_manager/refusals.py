"""Errors for clients that ask for a model that is not available."""

from __future__ import annotations

import math
import re
from pathlib import Path

from ..errors import APIError
from .model_slot import ModelSlot

_PATH = re.compile(r"(?<![\w.])(?:~|\.{1,2})?(?:/[^\s/:,;'\"()]+)+/?")
_RETRY_S = 5
"""Seconds in `Retry-After` if the queue for a model is full."""


def not_loaded(slot: ModelSlot) -> APIError:
    """503: the model could not be loaded. `Retry-After` is the rest of its back-off."""
    message = f"The model {slot.name!r} could not be loaded: {reason_of(slot)}"
    return APIError(503, "overloaded", message, param="model", code="model_not_loaded", retry_s=max(math.ceil(slot.retry_in_s), 1))


def too_many_waiting(slot: ModelSlot) -> APIError:
    """503: the queue for this model is full."""
    message = f"{len(slot.waiting)} requests wait already for {slot.name!r} to be loaded: try again later."
    return APIError(503, "overloaded", message, param="model", code="too_many_waiting", retry_s=_RETRY_S)


def reason_of(slot: ModelSlot) -> str:
    """The reason why a model is not loaded, without folders: clients must not see file locations.

    The folders of the model and of its adapters are removed first, because `without_paths` cannot recognize folders with spaces.
    """
    error = slot.unreadable if slot.failure is None else slot.failure.reason
    reason = str(error or "its engine has ended")
    known = [] if slot.args is None else [slot.args.path_or_id, *(slot.args.adapters or {}).values()]
    for folder in sorted({str(place.parent) for one in known for place in _absolute_paths(one)}, key=len, reverse=True):
        if folder not in ("/", "."):
            reason = reason.replace(f"{folder}/", "")
    return without_paths(reason)


def _absolute_paths(path: str | Path) -> tuple[Path, Path]:
    given = Path(path).expanduser().absolute()
    return given, given.resolve()


def without_paths(message: str) -> str:
    """The message with each path cut to its last part. A path is assumed to end at a space or at punctuation."""
    return _PATH.sub(lambda found: found[0].rstrip("/").rpartition("/")[2], message)
