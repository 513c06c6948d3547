"""The documented exit codes are those of the program."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from mlxinfer.cli import BROKEN_PIPE, INTERRUPTED
from mlxinfer.errors import GroupLostError, MLXInferError


def test_the_guide_has_every_code() -> None:
    page = (Path(__file__).parents[2] / "docs" / "chat.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\d, ]+) \|", page, re.MULTILINE)
    told = {int(code) for row in rows for code in row.split(",")}
    signals = {128 + int(each) for each in (signal.SIGTERM, signal.SIGHUP)}
    assert told == {0, BROKEN_PIPE, INTERRUPTED, MLXInferError.exit_code, GroupLostError.exit_code, *signals}
