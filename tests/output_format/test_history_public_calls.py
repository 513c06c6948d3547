"""Every call that a public suite expects, written in ten formats and read back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxinfer.output_format import OutputFormat
from mlxinfer.output_format.history import write_calls
from mlxinfer.output_format.table import FAMILIES
from mlxinfer.structure import Schema
from mlxinfer.tools import Tool, Tools
from tests.support.schemas.function_sets import FOLDER
from tests.support.schemas.tool_chats import Call, calls_in, read

FORMATS = ("hermes", "llama3", "mistral-nemo", "mistral", "deepseek-r1", "kimi-k2", "qwen3-coder", "deepseek-v3.2", "gemma4", "pythonic")
SINGLE_TURN = (
    "simple_*",
    "multiple",
    "parallel",
    "parallel_multiple",
    "live_simple",
    "live_multiple",
    "live_parallel",
    "live_parallel_multiple",
)
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", type(None): "null"}


def _expected(accepted: Any) -> Any:
    """One of the accepted values; they are listed at every level, and an empty text says that none is accepted as well."""
    chosen = next((value for value in accepted if value != ""), "") if isinstance(accepted, list) else accepted
    if isinstance(chosen, dict):
        return {key: _expected(value) for key, value in chosen.items() if value != [""]}
    if isinstance(chosen, list):
        return [{key: _expected(each) for key, each in value.items()} if isinstance(value, dict) else value for value in chosen]
    return chosen


def _answers(directory: Path) -> Iterator[tuple[str, list[Call]]]:
    for pattern in SINGLE_TURN:
        for path in sorted((directory / "possible_answer").glob(f"BFCL_v[0-9]_{pattern}.json")):
            for line in path.read_text(encoding="utf-8").splitlines():
                entry = json.loads(line)
                yield entry["id"], [(name, _expected([arguments])) for call in entry["ground_truth"] for name, arguments in call.items()]


def _tools(calls: list[Call]) -> Tools:
    """Tools whose arguments have the types of these calls; a text among the values makes it a text or the other type."""
    kinds: dict[str, dict[str, set[str]]] = {}
    for name, arguments in calls:
        properties = kinds.setdefault(name, {})
        for key, value in arguments.items():
            properties.setdefault(key, set()).add(_TYPES[type(value)])
    return {
        name: Tool(name, "", Schema({"type": "object", "properties": {key: {"type": sorted(found)} for key, found in properties.items()}}))
        for name, properties in kinds.items()
    }


@pytest.mark.slow
@pytest.mark.skipif(not FOLDER, reason="MLXINFER_TEST_BFCL does not name the data of bfcl-eval")
@pytest.mark.parametrize("family", FORMATS)
def test_every_ground_truth_is_read_back(family: str) -> None:
    calls_format = FAMILIES[family].calls
    format, count, failed = OutputFormat(None, calls_format, "table"), 0, []
    for name, calls in _answers(Path(FOLDER)):
        groups = [calls] if calls_format.parallel else [[call] for call in calls]
        for group in groups:
            text = write_calls(calls_format, group)
            if calls_in(read(format, text, range(1, len(text), 5), tools=_tools(calls))) != group:
                failed.append((name, text))
        count += 1
    assert count == 2_501
    assert not failed, (len(failed), failed[:3])
