"""Matrices as other tools quantize them, packed here bit by bit from random codes, with the numbers that they stand for in float64.

Nothing is shared with the readers of mlxinfer: layouts are those that the tools document or write.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Part = tuple[str, np.ndarray]
"""safetensors' name of the dtype, and an array whose bytes are stored."""


@dataclass
class Encoded:
    """One matrix."""

    parts: dict[str, Part]
    """By what follows the module's name."""
    truth: np.ndarray
    """float64 `[out, in]`."""


@dataclass
class Case:
    """A kind of checkpoint."""

    block: dict[str, Any]
    """`quantization_config`."""
    encode: Callable[[np.random.Generator, int, int], Encoded]
    """(random numbers, out, in) to a matrix."""
    form: tuple[int, int, str] | None = None
    """Bits, group size and mode in MLX; None where it has to be unpacked."""
    sidecar: dict[str, Any] | None = None
    """hf_quant_config.json, instead of the block."""
    exact: bool = False
    """True if float16 scales represent the source exactly."""
    wide_scales: bool = False
    """True if codes are kept and scales have all digits of float32, so products are rounded."""
    extra: dict[str, Part] = field(default_factory=dict)
    """Further tensors of each module, which are of no use."""


def write_safetensors(path: Path, tensors: Mapping[str, Part]) -> None:
    header, body = {}, b""
    for name, (dtype, array) in tensors.items():
        data = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def stream(codes: Sequence[int], bits: int) -> list[int]:
    """32-bit words of a stream of bits, the first code lowest."""
    whole = sum(int(code) << (bits * place) for place, code in enumerate(codes))
    return [(whole >> shift) & 0xFFFFFFFF for shift in range(0, len(codes) * bits, 32)]


def along(codes: np.ndarray, bits: int) -> np.ndarray:
    """Rows of codes to rows of int32 words."""
    return np.array([stream(row, bits) for row in codes], dtype=np.uint32).view(np.int32)


def half(rng: np.random.Generator, shape: tuple[int, ...], size: float) -> np.ndarray:
    return (size * (0.5 + rng.random(shape))).astype(np.float16)


def gptq(bits: int, group: int, order: str = "plain", version: int = 1, symmetric: bool = False) -> Case:
    def encode(rng: np.random.Generator, out: int, columns: int) -> Encoded:
        size = columns if group < 0 else group
        groups = columns // size
        codes = rng.integers(0, 2**bits, (out, columns))
        zeros = np.full((groups, out), 2 ** (bits - 1)) if symmetric else rng.integers(1, 2**bits, (groups, out))
        scales = half(rng, (groups, out), 0.5 / 2**bits)
        group_of = np.arange(columns) // size
        if order == "act":
            group_of = group_of[rng.permutation(columns)]
        truth = (codes - zeros.T[:, group_of]) * scales.astype(np.float64).T[:, group_of]
        parts = {
            "qweight": ("I32", along(codes, bits).T),
            "qzeros": ("I32", along(zeros - (1 if version == 1 else 0), bits)),
            "scales": ("F16", scales),
        }
        if order != "without":
            parts["g_idx"] = ("I32", group_of.astype(np.int32))
        return Encoded(parts, truth)

    block = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": order == "act", "sym": symmetric}
    block |= {"checkpoint_format": "gptq_v2"} if version == 2 else {}
    form = None if order == "act" and group > 0 else (bits, 128 if group < 0 else group, "affine")
    return Case(block, encode, form, exact=symmetric)


def awq(version: str, group: int) -> Case:
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def words(codes: np.ndarray) -> np.ndarray:
        found = np.zeros((len(codes), codes.shape[1] // 8), np.int64)
        for place, column in enumerate(order):
            found |= codes[:, column::8].astype(np.int64) << (4 * place)
        return found.astype(np.uint32).view(np.int32)

    def encode(rng: np.random.Generator, out: int, columns: int) -> Encoded:
        groups = columns // group
        codes, zeros = rng.integers(0, 16, (out, columns)), rng.integers(0, 16, (out, groups))
        scales = half(rng, (out, groups), 0.03)
        group_of = np.arange(columns) // group
        truth = (codes - zeros[:, group_of]) * scales.astype(np.float64)[:, group_of]
        if version == "gemm":
            stored = {"qweight": words(codes.T), "qzeros": words(zeros.T), "scales": scales.T}
        else:
            multiple = {128: 1, 64: 2, 32: 4}[group]
            width = math.ceil(math.ceil(groups / 8) / multiple) * multiple
            padded = np.zeros((out, width * 8), np.int64)
            padded[:, :groups] = zeros
            wide = np.zeros((out, width * 8), np.float16)
            wide[:, :groups] = scales
            stored = {"qweight": along(codes, 4), "qzeros": along(padded, 4), "scales": wide}
        return Encoded({name: ("F16" if name == "scales" else "I32", array) for name, array in stored.items()}, truth)

    block = {"quant_method": "awq", "bits": 4, "group_size": group, "version": version.upper(), "zero_point": True}
    return Case(block, encode, (4, group, "affine"))


def e4m3(code: int) -> float:
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, (code >> 3) & 15, code & 7
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


E4M3 = np.array([e4m3(code) for code in range(256)])
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
_FINITE = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)


def fp8(scales: str, block: tuple[int, int] = (128, 128), name: str = "weight_scale_inv", **settings: Any) -> Case:
    """`scales`: "block", "powers" (of two, in float32), "e8m0" (as bytes), "row", "tensor" or "scalar"."""

    def encode(rng: np.random.Generator, out: int, columns: int) -> Encoded:
        codes = rng.choice(_FINITE[(_FINITE & 0x7F) < 0x50], (out, columns))
        shape = {"row": (out, 1), "tensor": (1,), "scalar": ()}.get(scales, (-(-out // block[0]), -(-columns // block[1])))
        if scales in ("powers", "e8m0"):
            exponents = rng.integers(-7, -3, shape)
            factors: Any = 2.0**exponents
            stored = ("U8", (exponents + 127).astype(np.uint8)) if scales == "e8m0" else ("F32", factors.astype(np.float32))
            stored = ("F8_E8M0", stored[1]) if scales == "e8m0" else stored
        else:
            factors = np.asarray(0.02 * (0.5 + rng.random(shape)), np.float32)
            stored = ("F32", factors)
        factors = np.asarray(factors, np.float64)
        if scales in ("block", "powers", "e8m0"):
            factors = np.repeat(np.repeat(factors, block[0], 0), block[1], 1)[:out, :columns]
        return Encoded({"weight": ("F8_E4M3", codes), name: stored}, E4M3[codes] * factors)

    form = (8, 32, "mxfp8") if scales in ("powers", "e8m0") else None
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block), **settings}
    return Case(quantization, encode, form, exact=True, extra={"input_scale": ("F32", np.ones((), np.float32))})


def compressed(kind: str, group: int = 0) -> Case:
    """`kind`: "int4", "asymmetric", "act-order", "int8", "fp8"."""
    bits = 8 if kind in ("int8", "fp8") else 4

    def encode(rng: np.random.Generator, out: int, columns: int) -> Encoded:
        groups, low = columns // group if group else 1, 2 ** (bits - 1)
        codes = rng.integers(-low, low, (out, columns))
        scales = half(rng, (out, groups), 0.5 / 2**bits)
        group_of = np.arange(columns) // (columns // groups)
        zeros = rng.integers(-low, low, (out, groups)) if kind == "asymmetric" else np.zeros((out, groups), np.int64)
        if kind == "act-order":
            group_of = group_of[rng.permutation(columns)]
        truth = (codes - zeros[:, group_of]) * scales.astype(np.float64)[:, group_of]
        parts: dict[str, Part] = {"weight_scale": ("F16", scales)}
        if kind == "int8":
            return Encoded({"weight": ("I8", codes.astype(np.int8)), **parts}, truth)
        parts |= {"weight_packed": ("I32", along(codes + low, bits)), "weight_shape": ("I64", np.array([out, columns]))}
        if kind == "asymmetric":
            parts["weight_zero_point"] = ("I32", along((zeros + low).T, bits).T)
        if kind == "act-order":
            parts["weight_g_idx"] = ("I32", group_of.astype(np.int32))
        return Encoded(parts, truth)

    if kind == "fp8":
        case = fp8("row", name="weight_scale")
        return Case(_compressed_block("float-quantized", "float", 8), case.encode, None, exact=True)
    name = "int-quantized" if kind == "int8" else "pack-quantized"
    form = None if kind == "act-order" else (bits, group or 128, "affine")
    return Case(_compressed_block(name, "int", bits), encode, form, exact=kind in ("int4", "int8"))


def _compressed_block(name: str, kind: str, bits: int) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": bits, "type": kind, "symmetric": True}}
    return {"quant_method": "compressed-tensors", "format": name, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


def float4(kind: str, whole: float = 1.0) -> Case:
    """`kind`: "nvfp4" (compressed-tensors), "modelopt" (its nvfp4) or "mxfp4" (compressed-tensors). `whole` is the scale of the matrix."""
    size = 32 if kind == "mxfp4" else 16

    def encode(rng: np.random.Generator, out: int, columns: int) -> Encoded:
        codes = rng.integers(0, 16, (out, columns))
        stored = (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)
        if kind == "mxfp4":
            exponents = rng.integers(118, 123, (out, columns // size)).astype(np.uint8)
            scales = 2.0 ** (exponents.astype(np.float64) - 127)
            return Encoded({"weight_packed": ("U8", stored), "weight_scale": ("U8", exponents)}, E2M1[codes] * np.repeat(scales, size, 1))
        eights = rng.integers(0x50, 0x60, (out, columns // size)).astype(np.uint8)
        factor = np.float32(whole / 256)
        scales = (E4M3[eights].astype(np.float32) * factor).astype(np.float64)
        truth = E2M1[codes] * np.repeat(scales, size, 1)
        if kind == "modelopt":
            return Encoded({"weight": ("U8", stored), "weight_scale": ("F8_E4M3", eights), "weight_scale_2": ("F32", factor)}, truth)
        divisor = np.array([1 / factor], np.float32)
        scales = (E4M3[eights].astype(np.float32) / divisor).astype(np.float64)
        truth = E2M1[codes] * np.repeat(scales, size, 1)
        return Encoded(
            {"weight_packed": ("U8", stored), "weight_scale": ("F8_E4M3", eights), "weight_global_scale": ("F32", divisor)}, truth
        )

    folds = math.log2(whole).is_integer() and whole > 0.1  # else scales leave the normal range of their 8 bits
    form = (4, 32, "mxfp4") if kind == "mxfp4" else (4, 16, "nvfp4") if folds else None
    if kind == "modelopt":
        return Case({}, encode, form, {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}, exact=True)
    return Case(_compressed_block(f"{kind}-pack-quantized", "float", 4), encode, form, exact=True)


NF4 = np.array([-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0.0, 0.0795803, 0.1609302, 0.2461123,
                0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0], np.float32)  # fmt: skip


def bitsandbytes(kind: str, block: int = 64) -> Case:
    """`kind`: "nf4", "double" (nf4 with quantized scales) or "int8"."""

    def encode(rng: np.random.Generator, out: int, columns: int) -> Encoded:
        if kind == "int8":
            codes, largest = rng.integers(-127, 128, (out, columns)), np.asarray(0.3 + rng.random(out), np.float32)
            scales = (largest / np.float32(127)).astype(np.float64)
            return Encoded({"weight": ("I8", codes.astype(np.int8)), "SCB": ("F32", largest)}, codes * scales[:, None])
        codes = rng.integers(0, 16, out * columns)
        stored = (codes[0::2] << 4 | codes[1::2]).astype(np.uint8)[:, None]
        count = -(-codes.size // block)
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": [out, columns]}
        parts: dict[str, Part] = {"weight": ("U8", stored), "weight.quant_map": ("F32", NF4)}
        if kind == "double":
            table = np.sort(rng.standard_normal(256)).astype(np.float32) * np.float32(0.1)
            outer = np.asarray(1 + rng.random(-(-count // 256)), np.float32)
            eights = rng.integers(0, 256, count).astype(np.uint8)
            absmax = table[eights] * outer[np.arange(count) // 256] + np.float32(0.25)
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.25}
            parts |= {"weight.absmax": ("U8", eights), "weight.nested_absmax": ("F32", outer), "weight.nested_quant_map": ("F32", table)}
        else:
            absmax = np.asarray(0.2 + rng.random(count), np.float32)
            parts["weight.absmax"] = ("F32", absmax)
        text = np.frombuffer(json.dumps(state).encode(), np.uint8)
        parts["weight.quant_state.bitsandbytes__nf4"] = ("U8", text)
        truth = NF4[codes].astype(np.float64) * absmax.astype(np.float64)[np.arange(codes.size) // block]
        return Encoded(parts, truth.reshape(out, columns))

    block_of = {"quant_method": "bitsandbytes", "load_in_4bit": kind != "int8", "load_in_8bit": kind == "int8"}
    return Case(block_of, encode, (8, 128, "affine") if kind == "int8" else None, wide_scales=kind == "int8")


CASES: dict[str, Case] = {
    **{f"gptq-{bits}": gptq(bits, 128) for bits in (2, 3, 4, 8)},
    **{f"gptq-4-{group}": gptq(4, group) for group in (32, 64, -1)},
    "gptq-symmetric": gptq(4, 128, symmetric=True),
    "gptq-without-order": gptq(4, 64, "without"),
    **{f"gptq-act-{bits}": gptq(bits, 32, "act") for bits in (2, 3, 4, 8)},
    "gptq-act-rows": gptq(4, -1, "act"),
    **{f"gptq-v2-{bits}": gptq(bits, 64, version=2) for bits in (3, 4)},
    **{f"awq-{version}-{group}": awq(version, group) for version in ("gemm", "gemv") for group in (32, 64, 128)},
    "fp8-block": fp8("block"),
    "fp8-small-block": fp8("block", (32, 96)),
    "fp8-powers": fp8("powers", scale_fmt="ue8m0"),
    "fp8-e8m0": fp8("e8m0"),
    **{f"fp8-{scales}": fp8(scales, name="weight_scale") for scales in ("row", "tensor", "scalar")},
    "compressed-int4": compressed("int4", 32),
    "compressed-int4-rows": compressed("int4"),
    "compressed-asymmetric": compressed("asymmetric", 64),
    "compressed-act-order": compressed("act-order", 64),
    "compressed-int8": compressed("int8"),
    "compressed-fp8": compressed("fp8"),
    "compressed-nvfp4": float4("nvfp4", 1.1),
    "compressed-nvfp4-power": float4("nvfp4", 0.5),
    "compressed-nvfp4-too-fine": float4("nvfp4", 2.0**-8),
    "compressed-mxfp4": float4("mxfp4"),
    "modelopt-nvfp4": float4("modelopt", 0.9),
    "modelopt-nvfp4-power": float4("modelopt", 1.0),
    "modelopt-fp8": Case({}, fp8("scalar", name="weight_scale").encode, None, {"quantization": {"quant_algo": "FP8"}}, exact=True),
    **{f"bitsandbytes-{kind}": bitsandbytes(kind) for kind in ("nf4", "double", "int8")},
}
