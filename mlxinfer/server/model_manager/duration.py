"""Durations for keeping a model loaded, in the notation of Ollama, LM Studio and the command line."""

from __future__ import annotations

import re

from .model_slot import FOR_EVER

_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)", re.ASCII)
_WHOLE = re.compile(r"([+-]?)(0|(?:(?:\d+(?:\.\d*)?|\.\d+)(?:ns|us|µs|ms|s|m|h))+)", re.ASCII)
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def seconds_of(value: float | str) -> float | None:
    """Seconds for 300, "5m", "1h30m", "-1s" or "0", the Go durations of Ollama's `keep_alive`. A negative value means for ever. None for
    a text that is not a duration."""
    if not isinstance(value, str):
        return FOR_EVER if value < 0 else float(value)
    found = _WHOLE.fullmatch(value)
    if found is None:
        return None
    sign, text = found.groups()
    total = sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(text))
    return FOR_EVER if sign == "-" and total else total
