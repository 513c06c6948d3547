"""What a client is told when a model cannot be had."""

from __future__ import annotations

import math
import re
import time

from ..errors import APIError
from .slot import Slot

_PATH = re.compile(r"(?<![\w.])(?:~|\.{1,2})?(?:/[^\s/:,;'\"()]+)+/?")
_RETRY_S = 5
"""Seconds after which those may try again for whom the queue was too long."""


def not_loaded(slot: Slot) -> APIError:
    """503: the model could not be loaded, and may be tried again when its back-off is over."""
    left_s = slot.retry_at - time.monotonic()
    reason = without_paths(str(slot.failure or "nobody said why"))
    message = f"The model {slot.name!r} could not be loaded: {reason}"
    return APIError(503, "overloaded", message, param="model", code="model_not_loaded", retry_s=max(math.ceil(left_s), 1))


def too_many_waiting(slot: Slot) -> APIError:
    """503: as many requests wait for the model already as may."""
    message = f"{len(slot.waiting)} requests wait already for {slot.name!r} to be loaded: try again later."
    return APIError(503, "overloaded", message, param="model", code="too_many_waiting", retry_s=_RETRY_S)


def without_paths(message: str) -> str:
    """The message with the last parts of paths only: clients are not told where files are."""
    return _PATH.sub(lambda found: found[0].rstrip("/").rpartition("/")[2], message)
