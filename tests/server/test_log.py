"""Lines of the server go to standard error as it is when they are written."""

from __future__ import annotations

import io
import json
import sys

import pytest

from mlxinfer.server import log


def test_standard_error_may_be_replaced_and_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", first)
    log.start_logging()
    log.notice("one")
    first.close()
    monkeypatch.setattr(sys, "stderr", second)
    log.notice("two", answer=42)
    assert "Logging error" not in second.getvalue()
    (line,) = map(json.loads, second.getvalue().splitlines())
    assert (line["message"], line["answer"]) == ("two", 42)
