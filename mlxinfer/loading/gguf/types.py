"""Tensor types of GGUF, with the elements and bytes of a block."""

from __future__ import annotations

from pathlib import Path

from ...errors import UnsupportedModelError
from ...util.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class TensorType:
    """A storage type of ggml."""

    id: int
    """Number in GGUF files."""
    name: str
    """ggml's name, such as Q4_K."""
    block: int
    """Elements of a block; 1 for plain types."""
    block_bytes: int


QUANTIZED = ("Q", "I", "T")
"""First letters of the quantized types (Q4_K, IQ4_XS, TQ1_0). Floating types start with F or B; MX and NV formats are MLX's own."""

_TABLE = (
    (0, "F32", 1, 4),
    (1, "F16", 1, 2),
    (2, "Q4_0", 32, 18),
    (3, "Q4_1", 32, 20),
    (4, "MXFP4_OLLAMA", 32, 17),
    (6, "Q5_0", 32, 22),
    (7, "Q5_1", 32, 24),
    (8, "Q8_0", 32, 34),
    (9, "Q8_1", 32, 40),
    (10, "Q2_K", 256, 84),
    (11, "Q3_K", 256, 110),
    (12, "Q4_K", 256, 144),
    (13, "Q5_K", 256, 176),
    (14, "Q6_K", 256, 210),
    (15, "Q8_K", 256, 292),
    (16, "IQ2_XXS", 256, 66),
    (17, "IQ2_XS", 256, 74),
    (18, "IQ3_XXS", 256, 98),
    (19, "IQ1_S", 256, 50),
    (20, "IQ4_NL", 32, 18),
    (21, "IQ3_S", 256, 110),
    (22, "IQ2_S", 256, 82),
    (23, "IQ4_XS", 256, 136),
    (24, "I8", 1, 1),
    (25, "I16", 1, 2),
    (26, "I32", 1, 4),
    (27, "I64", 1, 8),
    (28, "F64", 1, 8),
    (29, "IQ1_M", 256, 56),
    (30, "BF16", 1, 2),
    (34, "TQ1_0", 256, 54),
    (35, "TQ2_0", 256, 66),
    (39, "MXFP4", 32, 17),
    (40, "NVFP4", 64, 36),
    (41, "Q1_0", 128, 18),
)
TENSOR_TYPES = {row[0]: TensorType(*row) for row in _TABLE}
"""Types by number. The table is that of the `gguf` package, which is slow to import and may have newer types. llama.cpp has withdrawn
number 4; Ollama's first files of gpt-oss use it for MXFP4 with neighbouring codes in each byte."""

BLOCK_BYTES = {kind.name: kind.block_bytes / kind.block for kind in TENSOR_TYPES.values()}
"""Bytes of a number, by the type's name."""


def tensor_type(number: int, tensor: str, path: Path) -> TensorType:
    """The type with this number. Raises `UnsupportedModelError` with the tensor's name."""
    found = TENSOR_TYPES.get(number) or _of_gguf(number)
    if found is None:
        raise UnsupportedModelError(
            f"{path}: tensor {tensor} has the unknown type {number}; update the gguf package, or use another quantization of the model"
        )
    return found


def _of_gguf(number: int) -> TensorType | None:
    from gguf.constants import GGML_QUANT_SIZES

    return next((TensorType(number, kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items() if kind == number), None)
