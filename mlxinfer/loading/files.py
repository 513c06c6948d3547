"""Small JSON files of a model, and digests of files."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..util.plain_file import open_plain, read_plain

_FLOAT_TAG = "__float__"
_PIECE = 8 << 20
_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file, and decode transformers' tagged floats (`{"__float__": "Infinity"}`). Raises `CheckpointError`."""
    try:
        value = json.loads(read_plain(path))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({_first_line(error)}): download or copy it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__} where a JSON object is expected")
    decoded: dict[str, Any] = _decode(value)
    return decoded


def read_json_if_there(path: Path) -> dict[str, Any]:
    """Read a JSON file; empty if it does not exist."""
    return read_json(path) if path.exists() else {}


def add_bytes(digest: hashlib._Hash, path: Path) -> None:
    """Add all bytes of a file to a digest. Raises OSError."""
    with open_plain(path) as file:
        while piece := file.read(_PIECE):
            digest.update(piece)


def to_json(value: dict[str, Any]) -> str:
    """Encode as JSON that is valid even with non-finite floats, with sorted keys and a final newline."""
    return json.dumps(_encode(value), indent=4, sort_keys=True, allow_nan=False) + "\n"


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_FLOAT_TAG} and value[_FLOAT_TAG] in _FLOATS:
            return _FLOATS[value[_FLOAT_TAG]]
        return {key: _decode(item) for key, item in value.items()}
    return [_decode(item) for item in value] if isinstance(value, list) else value


def _encode(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT_TAG: "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"}
    if isinstance(value, dict):
        return {key: _encode(item) for key, item in value.items()}
    return [_encode(item) for item in value] if isinstance(value, (list, tuple)) else value


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
