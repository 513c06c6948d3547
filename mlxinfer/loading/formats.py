"""MLX's quantized formats, and the `quantization` block of a config, which assigns them to matrices."""

from __future__ import annotations

from collections import Counter
from typing import Any

import mlx.core as mx

from ..errors import CheckpointError, UnsupportedModelError
from ..nn.weights import Format
from ..util.device import default_dtype
from .checkpoint import Checkpoint
from .gguf import GGUFCheckpoint
from .gguf.mlx_formats import PACKINGS

_NAMES = {
    "float32": mx.float32, "fp32": mx.float32, "f32": mx.float32,
    "float16": mx.float16, "fp16": mx.float16, "f16": mx.float16,
    "bfloat16": mx.bfloat16, "bf16": mx.bfloat16,
}  # fmt: skip
_MANTISSA = {mx.float32: 23, mx.float16: 10, mx.bfloat16: 7}


def parse_dtype(dtype: str | mx.Dtype) -> mx.Dtype:
    """Parse `"bfloat16"`, `"bf16"` or `mx.bfloat16`. Raises `UnsupportedModelError`."""
    found = _NAMES.get(dtype) if isinstance(dtype, str) else dtype
    if found not in _MANTISSA:
        raise UnsupportedModelError(f"dtype must be float32, bfloat16 or float16, not {dtype!r}")
    return found


def dtype_name(dtype: mx.Dtype) -> str:
    """`mlx.core.bfloat16` to `bfloat16`."""
    return str(dtype).rpartition(".")[2]


def format_text(stored: Format | mx.Dtype) -> str:
    """Describe a format or dtype for notes and reports: "bfloat16", "4-bit affine in groups of 64"."""
    return f"{stored.bits}-bit {stored.mode} in groups of {stored.group_size}" if isinstance(stored, Format) else dtype_name(stored)


def main_dtype(checkpoint: Checkpoint) -> mx.Dtype | None:
    """The floating dtype of most bytes of the plain tensors, or None. GGUF types that are unpacked count as float32."""
    sizes: Counter[mx.Dtype] = Counter()
    for name in checkpoint.names():
        stored = checkpoint.stored(name)
        plain = isinstance(checkpoint, GGUFCheckpoint) or not checkpoint.unpacked_from(name)
        if plain and isinstance(stored, mx.Dtype) and stored in _MANTISSA:
            sizes[stored] += checkpoint.nbytes(name)
    return max(sizes, key=lambda dtype: sizes[dtype], default=None)


def compute_dtype(checkpoint: Checkpoint, asked: str | mx.Dtype | None) -> mx.Dtype:
    """The requested dtype, or else the fastest on this device.

    On a GPU that is the stored dtype if it has 16 bits, and float16, the dtype of their scales, for quantized GGUF files. float16 is
    never the default of architectures whose activations leave its range.
    """
    if asked is not None:
        return parse_dtype(asked)
    default = default_dtype()
    narrow = not str(checkpoint.config.get("model_type", "")).startswith(_WIDE)
    if default == mx.bfloat16 and narrow and (_has_half_scales(checkpoint) or main_dtype(checkpoint) == mx.float16):
        return mx.float16
    return default


_WIDE = ("gemma", "gpt_oss", "glm4", "plamo2")
"""Prefixes of architectures whose activations leave the range of float16. vLLM refuses float16 for all of them but gpt_oss, which was
trained and published in bfloat16 only (`_FLOAT16_NOT_SUPPORTED_MODELS` in vllm/config)."""


def _has_half_scales(checkpoint: Checkpoint) -> bool:
    return isinstance(checkpoint, GGUFCheckpoint) and bool(checkpoint.kinds() & PACKINGS.keys())


def loses_precision(stored: mx.Dtype, target: mx.Dtype) -> bool:
    """True if casting between these floating dtypes may round. float16 and bfloat16 lose precision or range either way."""
    return stored in _MANTISSA and target in _MANTISSA and stored != target and target != mx.float32


AFFINE_BITS = (2, 3, 4, 5, 6, 8)
AFFINE_GROUPS = (32, 64, 128)
FIXED = {"mxfp4": Format(4, 32, "mxfp4"), "mxfp8": Format(8, 32, "mxfp8"), "nvfp4": Format(4, 16, "nvfp4")}
"""Modes with one number of bits and one group size."""
MODES = ("affine", *FIXED)

_READABLE = tuple(Format(b, g) for g in AFFINE_GROUPS for b in (1, 7, *AFFINE_BITS)) + tuple(FIXED.values())


def check_format(bits: int | None, group_size: int | None, mode: str) -> Format:
    """The requested format, with the defaults of its mode. Raises `UnsupportedModelError` if MLX has no such format."""
    if mode not in MODES:
        raise UnsupportedModelError(f"unknown quantization mode {mode!r}: choose one of {', '.join(MODES)}")
    if mode in FIXED:
        fixed = FIXED[mode]
        if bits not in (None, fixed.bits) or group_size not in (None, fixed.group_size):
            raise UnsupportedModelError(f"{mode} has {fixed.bits} bits in groups of {fixed.group_size}, nothing else")
        return fixed
    chosen = Format(4 if bits is None else bits, 64 if group_size is None else group_size)
    if chosen.bits not in AFFINE_BITS:
        raise UnsupportedModelError(f"affine quantization has {_listed_with_or(AFFINE_BITS)} bits, not {bits}")
    if chosen.group_size not in AFFINE_GROUPS:
        raise UnsupportedModelError(f"affine quantization has groups of {_listed_with_or(AFFINE_GROUPS)}, not {group_size}")
    return chosen


def _listed_with_or(numbers: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}"


class QuantizationBlock:
    """The `quantization` block of a config: a default, and overrides per layer. `false` means that a layer is not quantized."""

    def __init__(self, block: dict[str, Any]) -> None:
        self._default = _format_of(block, "the config's quantization block")
        self._overrides = {path: entry for path, entry in block.items() if isinstance(entry, (dict, bool))}

    def format(self, name: str, weight: tuple[int, ...], scales: tuple[int, ...], scale_dtype: mx.Dtype) -> Format:
        """The format of the matrix `name` (without `.weight`), checked with the stored shapes. Raises `CheckpointError`.

        If the shapes contradict the default and there is no override, the format follows from the shapes.
        """
        override = self._overrides.get(name, True)
        if override is False:
            raise CheckpointError(f"{name} is quantized, but the config says that it is not")
        configured = _format_of(override, f"the quantization of {name}") if isinstance(override, dict) else self._default
        if _format_fits(configured, weight, scales, scale_dtype):
            return configured
        fitting = [f for f in _READABLE if _format_fits(f, weight, scales, scale_dtype)]
        if isinstance(override, dict) or not fitting:
            raise CheckpointError(
                f"{name}: weight {list(weight)} and scales {list(scales)} do not agree with {configured.bits} bits, "
                f"groups of {configured.group_size}, mode {configured.mode}"
            )
        return min(fitting, key=lambda f: (f.group_size != configured.group_size, f.bits != configured.bits))


def _format_of(entry: dict[str, Any], where: str) -> Format:
    mode = entry.get("mode", "affine")
    bits, group_size = entry.get("bits"), entry.get("group_size")
    if mode in FIXED:
        bits, group_size = bits or FIXED[mode].bits, group_size or FIXED[mode].group_size
    if type(bits) is not int or type(group_size) is not int or Format(bits, group_size, mode) not in _READABLE:
        raise UnsupportedModelError(f"{where} ({bits!r} bits, group size {group_size!r}, mode {mode!r}) is no format of MLX")
    return Format(bits, group_size, mode)


def _format_fits(f: Format, weight: tuple[int, ...], scales: tuple[int, ...], scale_dtype: mx.Dtype) -> bool:
    if (f.mode == "affine") == (scale_dtype == mx.uint8) or len(weight) < 2 or weight[:-1] != scales[:-1]:
        return False
    return weight[-1] * 32 == scales[-1] * f.group_size * f.bits


def packed_shapes(shape: tuple[int, ...], f: Format) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the packed weight and of its scales, for a matrix of this logical shape."""
    return (*shape[:-1], shape[-1] * f.bits // 32), (*shape[:-1], shape[-1] // f.group_size)
