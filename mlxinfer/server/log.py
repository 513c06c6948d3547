"""Logs one JSON object per line to standard error, never with the text of a prompt or an answer."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime, timezone
from typing import Any

_ACCESS = logging.getLogger("mlxinfer.access")
_NOTICED: set[str] = set()
"""Notices that are written once. They are made of names of fields that the server knows, so there are few."""


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {"time": when, "level": record.levelname.lower(), "logger": record.name, "message": record.getMessage()}
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class _StandardError(logging.Handler):
    """Writes to what `sys.stderr` is at the time of each line: where a server runs inside another program, that may change and close it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(f"{self.format(record)}\n")
            sys.stderr.flush()
        except (OSError, ValueError, TypeError):
            self.handleError(record)


def start_logging(level: int = logging.INFO) -> None:
    """Send mlxinfer's lines from `level` on, and uvicorn's warnings, to standard error."""
    handler = _StandardError()
    handler.setFormatter(_JsonLines())
    for name, least in (("mlxinfer", level), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(least)


def notice(message: str, **fields: Any) -> None:
    """Something that the operator of the server should know."""
    logging.getLogger("mlxinfer").info(message, extra={"fields": fields})


def notice_once(message: str, **fields: Any) -> None:
    """A notice that is written the first time only, as long as the process runs."""
    if message not in _NOTICED:
        _NOTICED.add(message)
        notice(message, **fields)


def access(fields: dict[str, Any]) -> None:
    """The line of one request, when its response has ended."""
    _ACCESS.info("request", extra={"fields": fields})
