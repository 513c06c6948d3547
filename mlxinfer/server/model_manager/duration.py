"""How long a model stays loaded, as Ollama's and LM Studio's clients and the command line say it."""

from __future__ import annotations

import re

from .model_slot import FOR_EVER

_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)", re.ASCII)
_WHOLE = re.compile(r"([+-]?)(0|(?:(?:\d+(?:\.\d*)?|\.\d+)(?:ns|us|µs|ms|s|m|h))+)", re.ASCII)
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def seconds_of(value: float | str) -> float | None:
    """Seconds, of which a negative number is for ever: 300, "5m", "1h30m", "-1s", "0"; None for a text that is no duration. These are the
    durations of Go that Ollama's `keep_alive` takes."""
    if not isinstance(value, str):
        return FOR_EVER if value < 0 else float(value)
    found = _WHOLE.fullmatch(value)
    if found is None:
        return None
    sign, text = found.groups()
    total = sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(text))
    return FOR_EVER if sign == "-" and total else total
