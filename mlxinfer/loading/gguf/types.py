"""The tensor types of GGUF: how many elements a block has, and how many bytes. The table is that of the `gguf` package."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ...errors import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class TensorType:
    """A storage type: `block` elements take `block_bytes` bytes. Plain types have blocks of one element."""

    id: int
    name: str
    block: int
    block_bytes: int


@cache
def tensor_types() -> dict[int, TensorType]:
    """Every type that the installed `gguf` package knows, by its number in the file."""
    from gguf.constants import GGML_QUANT_SIZES

    return {int(kind): TensorType(int(kind), kind.name, block, size) for kind, (block, size) in GGML_QUANT_SIZES.items()}


def tensor_type(number: int, tensor: str, path: Path) -> TensorType:
    """The type with this number. Raises `UnsupportedModelError` that names the tensor."""
    found = tensor_types().get(number)
    if found is None:
        raise UnsupportedModelError(
            f"{path}: tensor {tensor} has the unknown type {number}; update the gguf package, or use another quantization of the model"
        )
    return found
