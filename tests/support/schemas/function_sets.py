"""Function sets of PyPI's bfcl-eval, where its folder `bfcl_eval/data` is named by MLXINFER_TEST_BFCL."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlxinfer.tools import Tools, offered

FOLDER = os.environ.get("MLXINFER_TEST_BFCL", "")
"""`bfcl_eval/data` of the unpacked wheel of `bfcl-eval`: `pip download --no-deps bfcl-eval`. Empty without it."""
MOST = 300

_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": None, "String": "string", "Array": "array", "Boolean": "boolean"}


def normal(schema: Any) -> Any:
    """A schema of that collection with JSON's names of types."""
    if isinstance(schema, list):
        return [normal(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: normal(value) for key, value in schema.items()}
    kind = schema.get("type")
    if isinstance(kind, str):
        found["type"] = _TYPES.get(kind, kind)
        if found["type"] is None:
            del found["type"]
    return found


def function_sets(folder: str = FOLDER) -> Iterator[tuple[str, Tools]]:
    """(question, tools) of every third single-turn entry, up to 300."""
    count = 0
    for path in sorted(Path(folder).glob("BFCL_v4_*.json")):
        if not any(part in path.name for part in ("simple_python", "multiple", "live_simple")):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
            if number % 3 or count == MOST:
                continue
            entry = json.loads(line)
            count += 1
            yield entry["question"][0][-1]["content"], offered([normal(each) for each in entry["function"]])
