"""Logs to standard error: JSON lines, or short text lines on a terminal. Never logs the text of a prompt or an answer."""

from __future__ import annotations

import json
import logging
import sys
import time
from datetime import datetime, timezone
from typing import Any, Literal

LogFormat = Literal["auto", "text", "json"]
"""Format of log lines. "auto" means "text" on a terminal and "json" elsewhere."""
_ACCESS = logging.getLogger("mlxinfer.access")
_NOTICED: set[str] = set()
"""Notices that were already written. They contain only names of known fields, so there are few."""


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {"time": when, "level": record.levelname.lower(), "logger": record.name, "message": record.getMessage()}
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class _Text(logging.Formatter):
    """A formatter for lines like `20:08:41 POST /v1/chat/completions 200 157 ms smollm2 31+4 tokens`, in local time."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = getattr(record, "fields", {})
        when = time.strftime("%H:%M:%S", time.localtime(record.created))
        text = _request_line(fields) if record.name == _ACCESS.name else _notice_line(record, fields)
        trace = f"\n{self.formatException(record.exc_info)}" if record.exc_info else ""
        return f"{when} {text}{trace}"


def _request_line(fields: dict[str, Any]) -> str:
    ms = fields["ms"]
    parts = [
        fields["method"],
        fields.get("path", fields["route"]),
        fields["status"],
        f"{ms:.0f} ms" if ms < 10_000 else f"{ms / 1000:.1f} s",
    ]
    if "model" in fields:
        parts.append(fields["model"])
    if "prompt_tokens" in fields:
        parts.append(f"{fields['prompt_tokens']}+{fields.get('completion_tokens', 0)} tokens")
    if "error" in fields:
        parts.append(fields["error"])
    if "load_ms" in fields:
        parts.append(f"after {fields['load_ms'] / 1000:.1f} s of loading")
    return " ".join(map(str, parts))


def _notice_line(record: logging.LogRecord, fields: dict[str, Any]) -> str:
    level = f"{record.levelname.lower()}: " if record.levelno > logging.INFO else ""
    model = f"{fields['model']}: " if "model" in fields else ""
    rest = ", ".join(_for_people(name, value) for name, value in fields.items() if name != "model")
    return f"{level}{model}{record.getMessage()}{rest and f' ({rest})'}"


def _for_people(name: str, value: Any) -> str:
    if name == "seconds":
        return f"{value:.1f} s"
    if name.endswith("bytes"):
        size = f"{value / 1e9:.2f} GB" if value >= 5e8 else f"{value / 1e6:.3g} MB"
        return f"{size} {'at most' if name == 'limit_bytes' else 'in use'}"
    return f"{name.replace('_', ' ')} {value}"


def _is_quiet(record: logging.LogRecord) -> bool:
    """True for requests that text logs leave out: the page's files, and the frequent requests of pages and supervisors."""
    fields = getattr(record, "fields", {})
    if record.name != _ACCESS.name or fields["status"] >= 400:
        return False
    return fields["method"] == "GET" and (fields["route"] in ("/", "/health", "/metrics") or fields["route"].startswith("/page/"))


class _StandardError(logging.Handler):
    """Writes to the current `sys.stderr`. A program that embeds the server may replace and close it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(f"{self.format(record)}\n")
            sys.stderr.flush()
        except (OSError, ValueError, TypeError):
            self.handleError(record)


def start_logging(level: int = logging.INFO, log_format: LogFormat = "auto") -> None:
    """Write mlxinfer's log from `level` on, and uvicorn's warnings, to standard error. Text logs leave out successful requests for
    `/metrics`, `/health` and the page's files."""
    handler = _StandardError()
    if log_format == "text" or (log_format == "auto" and sys.stderr.isatty()):
        handler.setFormatter(_Text())
        handler.addFilter(lambda record: not _is_quiet(record))
    else:
        handler.setFormatter(_JsonLines())
    for name, least in (("mlxinfer", level), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(least)


def notice(message: str, *, level: int = logging.INFO, **fields: Any) -> None:
    """Log a message for the operator of the server."""
    logging.getLogger("mlxinfer").log(level, message, extra={"fields": fields})


def notice_once(message: str, **fields: Any) -> None:
    """Log a message for the operator, once in the life of the process."""
    if message not in _NOTICED:
        _NOTICED.add(message)
        notice(message, **fields)


def access(fields: dict[str, Any]) -> None:
    """Write the access log line of a finished request."""
    _ACCESS.info("request", extra={"fields": fields})
