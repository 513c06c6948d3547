"""Resolves `kv="auto"`: the fewest bits of cached keys and values with a small loss, as measured for the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...cache.kv_format import KVFormat
from ...errors import MLXInferError, SettingError
from ...util.cache_dir import cache_dir
from ...util.plain_file import file_stamp
from ..find.resolve import resolve

AUTO = "auto"
LIMIT = 0.005
"""Default limit of the mean KL divergence from a 16-bit cache, in nats."""
_SUFFIXES = (".safetensors", ".gguf")


def choice_file(path: Path) -> Path:
    """File with the measurement of the model at a resolved path. Other weights have another file."""
    import hashlib

    files = sorted(part for part in path.iterdir() if part.suffix in _SUFFIXES) if path.is_dir() else [path]
    stamps = json.dumps([file_stamp(part) for part in files])
    return cache_dir() / "kv" / f"{hashlib.blake2b(stamps.encode(), digest_size=16).hexdigest()}.json"


def save_choice(path: Path, chosen: str, limit: float, kl: float, measured: dict[str, Any]) -> Path:
    """Store a measurement of the model at a resolved path, so that `auto` means the format `chosen`. Returns the file. Raises
    `MLXInferError` if it cannot be written."""
    file = choice_file(path)
    text = json.dumps({"kv": chosen, "limit": limit, "kl_mean": kl, **measured}, indent=1)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise MLXInferError(f"cannot write {file}: {error.strerror or error}") from None
    return file


def kv_format(kv: str, model: str | Path, *, first16: bool = False) -> tuple[KVFormat, str]:
    """The format that `kv` names, and for "auto" a message for the user (else ""). Raises `MLXInferError`."""
    if str(kv).strip().lower() != AUTO:
        return KVFormat.parse(kv, first16=first16), ""
    found = resolve(model)
    known = _read_choice(found.path)
    if known is None:
        return KVFormat(), f"kv auto: 16 bits, as the loss of fewer was not measured for this model (mlxinfer eval kv {found.name})"
    form = KVFormat.parse(known["kv"])
    if first16 and not form.quantized:
        raise SettingError("kv auto keeps 16 bits for this model, so that kv_first16 changes nothing: leave it out")
    line = f"kv auto: {form.name}, measured for this model: KL {known['kl_mean']:.2g}, at most {known['limit']:g}"
    return KVFormat.parse(form.name, first16=first16), line


def _read_choice(path: Path) -> dict[str, Any] | None:
    try:
        known = json.loads(choice_file(path).read_text(encoding="utf-8"))
        KVFormat.parse(known["kv"])
        return known if isinstance(known["kl_mean"], (int, float)) and isinstance(known["limit"], (int, float)) else None
    except (OSError, ValueError, KeyError, TypeError, MLXInferError):
        return None
