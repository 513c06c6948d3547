"""Checkpoints of any size whose tensors are holes in their files: real configs, names, dtypes and shapes, and no weights.

A list of tensors has lines such as `BF16 768x2048 model.layers.{0-47}.mlp.experts.{0-127}.{gate_proj,up_proj}.weight`: a dtype of
safetensors, a shape (`scalar` for none), and a name with alternatives in braces, of which those with a hyphen are ranges.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from itertools import islice, product
from math import prod
from pathlib import Path
from typing import Any

from mlxinfer.loading.safetensors import HeaderEntry

_BYTES = {"U8": 1, "F8_E4M3": 1, "BF16": 2, "F16": 2, "F32": 4}
_SHARD = 16_000
"""Tensors in a file; more files make up the checkpoint where it has more."""


def tensors(listed: str) -> dict[str, HeaderEntry]:
    """By name, in the order of the list; places in a file are counted from 0."""
    found: dict[str, HeaderEntry] = {}
    for line in listed.splitlines():
        dtype, shape, names = line.split(" ")
        sizes = () if shape == "scalar" else tuple(map(int, shape.split("x")))
        size = prod(sizes) * _BYTES[dtype]
        for name in _expanded(names):
            assert name not in found, name
            found[name] = HeaderEntry(name, dtype, sizes, 0, size)
    return found


def write_sparse(target: Path, config: Mapping[str, Any], entries: Mapping[str, HeaderEntry]) -> Path:
    """A model directory with these tensors, all of zeros. It takes the bytes of its headers on disk."""
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(config))
    rest, shards = iter(entries.values()), -(-len(entries) // _SHARD)
    where: dict[str, str] = {}
    for number in range(1, shards + 1):
        name = "model.safetensors" if shards == 1 else f"model-{number:05d}-of-{shards:05d}.safetensors"
        part = list(islice(rest, _SHARD))
        where.update({info.name: name for info in part})
        _write_file(target / name, part)
    if shards > 1:
        (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return target


def _write_file(path: Path, part: list[HeaderEntry]) -> None:
    header, end = {}, 0
    for info in part:
        header[info.name] = {"dtype": info.dtype, "shape": info.shape, "data_offsets": [end, end + info.nbytes]}
        end += info.nbytes
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def _expanded(names: str) -> Iterator[str]:
    parts = re.split(r"\{(.*?)\}", names)
    choices = [list(_choices(part)) if at % 2 else [part] for at, part in enumerate(parts)]
    return map("".join, product(*choices))


def _choices(listed: str) -> Iterator[str]:
    for choice in listed.split(","):
        first, _, last = choice.partition("-")
        yield from map(str, range(int(first), int(last) + 1)) if last else [choice]
