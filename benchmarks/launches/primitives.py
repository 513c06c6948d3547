"""The launches of MLX's primitives on Metal, from snapshot 846d176 of github.com/ml-explore/mlx; paths are below mlx/backend.

A launch is one dispatch of a kernel. Copies of inputs with gaps, which some primitives make first, are launches too. Caches and updated
arrays are assumed to be written in place (`is_donatable`). MLX would first copy a buffer that is still in use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from . import layout
from .graph import Node
from .layout import Laid

VIEWS = {
    "AsStrided", "Broadcast", "BroadcastAxes", "Copy", "CustomTransforms", "Depends", "ExpandDims", "NumberOfElements", "Slice", "Split",
    "Squeeze", "StopGradient", "Transpose", "Flatten", "Reshape", "Unflatten", "View",
}  # fmt: skip
"""gpu/primitives.cpp and common/common.cpp: these share their input's buffer. Flatten, Reshape and Unflatten copy where strides require
it (`reshape_gpu`), and View where the size of numbers changes along an axis with gaps."""

ELEMENTWISE = {
    "Abs", "Add", "ArcCos", "ArcSin", "ArcTan", "ArcTan2", "AsType", "BitwiseBinary", "BitwiseInvert", "Ceil", "Clip", "Compiled",
    "Cos", "Divide", "DivMod", "Equal", "Erf", "ErfInv", "Exp", "Expm1", "Floor", "FloorDivide", "Greater", "GreaterEqual", "Less",
    "LessEqual", "Log", "Log1p", "LogAddExp", "LogicalAnd", "LogicalNot", "LogicalOr", "Maximum", "Minimum", "Multiply", "Negative",
    "NotEqual", "Power", "Remainder", "Round", "Select", "Sigmoid", "Sign", "Sin", "Sqrt", "Square", "Subtract", "Tan", "Tanh",
}  # fmt: skip
"""metal/unary.cpp, binary.cpp, ternary.cpp, compiled.cpp and gpu/copy.cpp: one launch, for any strides."""

SINGLE = {"Arange", "ArgReduce", "Convolution", "Full", "Gather", "GatherAxis", "LogSumExp", "RandomBits", "Reduce", "Scan", "Softmax"}
"""metal/primitives.cpp, indexing.cpp, reduce.cpp, scan.cpp, softmax.cpp, logsumexp.cpp: one launch. A reduction of a whole large
array takes two, but the models here do not have any. A convolution, in metal/conv.cpp, takes one if each channel has its own kernel."""

TOUCHING = {"Scatter": 1, "ScatterAxis": 1, "SliceUpdate": 1, "DynamicSliceUpdate": 2}
"""metal/indexing.cpp and gpu/primitives.cpp: these write a part of an array in place. A place that only the GPU knows takes a separate
launch (`compute_dynamic_offset`)."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """A GPU, as MLX chooses kernels (`get_architecture` in metal/device.cpp).

    `generation` is 13 for M1 to 17 for M5. `size` is "g" for base chips and Pro, "s" for Max, "d" for Ultra.
    """

    generation: int
    size: str


@dataclass(frozen=True, slots=True)
class Launch:
    """One dispatch of a kernel; `name` is the primitive or the custom kernel.

    `reads` are bytes, counted as often as the kernel reads them. `repeated` are those read before, which are mostly in a cache. `matrix`
    are those of weights, including repeated ones. `stage` is the length of the longest chain of launches that ends with this one.
    `operations` are multiplications and additions of a product or of attention. `unpacked` are numbers taken out of quantized matrices,
    including repeated ones. `on_matrix_units`: products run as tiles of matrices, which takes many rows. `source` are the bytes of a
    kernel's source, which MLX hashes on the host at every launch.
    """

    name: str
    reads: int
    writes: int
    stage: int
    repeated: int = 0
    matrix: int = 0
    operations: int = 0
    unpacked: int = 0
    on_matrix_units: bool = False
    source: int = 0


Outcome = tuple[list[Launch], list[Laid]]
Rule = Callable[[Node, Sequence[Laid], Sequence[Laid], Architecture], Outcome]
"""Maps a node, its inputs, and its outputs as if they were new arrays, to its launches and its real outputs."""


def after(inputs: Sequence[Laid], ended: int = 1) -> int:
    """The stage of `ended` launches after the inputs."""
    return max((a.stage for a in inputs), default=0) + ended


def made(outputs: Sequence[Laid], stage: int) -> list[Laid]:
    return [replace(a, stage=stage) for a in outputs]


def ready(array: Laid, name: str, launches: list[Launch], *, fine: bool) -> Laid:
    """The array if it is `fine`, otherwise a copy without gaps, whose launch is added."""
    if fine:
        return array
    copy = replace(array, strides=layout.rows(array.shape), stage=array.stage + 1)
    launches.append(Launch(f"copy for {name}", array.bytes, copy.bytes, copy.stage))
    return copy


def view(node: Node, inputs: Sequence[Laid], outputs: Sequence[Laid], gpu: Architecture) -> Outcome:
    """Views, with the copies that some of them need."""
    source, shape, stage = inputs[0], outputs[0].shape, after(inputs, 0)
    if node.name in ("Depends", "CustomTransforms"):
        first = 0 if node.name == "Depends" else len(inputs) - len(outputs)
        return [], [replace(a, stage=stage) for a in inputs[first : first + len(outputs)]]
    if node.name in ("Broadcast", "BroadcastAxes"):
        return [], [replace(layout.broadcast(source, shape), stage=source.stage)]
    if node.name == "Transpose":
        return [], [layout.transposed(source, node.arguments[0])]
    if node.name == "Slice":
        return [], [layout.sliced(source, shape, node.arguments[2])]
    if node.name == "Split":
        return [], [replace(source, shape=a.shape) for a in outputs]
    if node.name in ("ExpandDims", "Squeeze"):
        return [], [layout.realigned(source, shape)]
    if node.name in ("Flatten", "Reshape", "Unflatten"):
        found = layout.reshaped(source, shape)
        return ([], [found]) if found else _copied(node, source, outputs)
    if node.name == "View":
        return ([], made(outputs, source.stage)) if source.in_rows else _copied(node, source, outputs)
    return [], made(outputs, stage) if node.name in ("AsStrided", "NumberOfElements") else [replace(source, stage=stage)]


def _copied(node: Node, source: Laid, outputs: Sequence[Laid]) -> Outcome:
    copy = Launch(f"copy for {node.name}", source.bytes, source.bytes, source.stage + 1)
    return [copy], made(outputs, copy.stage)


def elementwise(node: Node, inputs: Sequence[Laid], outputs: Sequence[Laid], gpu: Architecture) -> Outcome:
    """One launch, or several of a long compiled function. Results have the strides of inputs. A conversion to the same dtype is free."""
    count = node.details.get("kernels", 1)
    stage = after(inputs, count)
    if node.name == "AsType" and inputs[0].dtype == outputs[0].dtype:
        return [], [inputs[0]]
    results = [replace(layout.like(inputs, a.shape, a.dtype), stage=stage) for a in outputs]
    read, written = sum(a.bytes for a in inputs), sum(a.bytes for a in outputs)
    return [Launch(node.name, read, written, stage - i) for i in reversed(range(count))], results


def single(node: Node, inputs: Sequence[Laid], outputs: Sequence[Laid], gpu: Architecture) -> Outcome:
    stage, written = after(inputs), sum(a.bytes for a in outputs)
    read = sum(a.bytes for a in inputs)
    if node.name in ("Gather", "GatherAxis"):
        read = written + sum(a.bytes for a in inputs[1:])
    return [Launch(node.name, read, written, stage)], made(outputs, stage)


def touching(node: Node, inputs: Sequence[Laid], outputs: Sequence[Laid], gpu: Architecture) -> Outcome:
    """Only the updates and their places count."""
    news = [a for a in inputs[1:] if a.dtype == inputs[0].dtype] or inputs[1:]
    written = max(a.size for a in news) * inputs[0].dtype.size
    stage = after(inputs, TOUCHING[node.name])
    launches = [Launch(node.name, sum(a.bytes for a in inputs[1:]), written, stage)]
    if node.name == "DynamicSliceUpdate":
        launches.insert(0, Launch("offset for DynamicSliceUpdate", inputs[2].bytes, 8, inputs[2].stage + 1))
    return launches, made(outputs, stage)


def concatenate(node: Node, inputs: Sequence[Laid], outputs: Sequence[Laid], gpu: Architecture) -> Outcome:
    """metal/slicing.cpp: one copy per input, in parallel."""
    parts = [a for a in inputs if a.size]
    launches = [Launch("Concatenate", a.bytes, a.size * a.dtype.size, a.stage + 1) for a in parts]
    return launches, made(outputs, after(parts))


def contiguous(node: Node, inputs: Sequence[Laid], outputs: Sequence[Laid], gpu: Architecture) -> Outcome:
    launches: list[Launch] = []
    return launches, [ready(inputs[0], node.name, launches, fine=inputs[0].in_rows)]


def pad(node: Node, inputs: Sequence[Laid], outputs: Sequence[Laid], gpu: Architecture) -> Outcome:
    """gpu/slicing.cpp: a fill, and a copy into it."""
    filled, stage = outputs[0].bytes, after(inputs, 2)
    launches = [Launch("Pad", 0, filled, stage - 1), Launch("Pad", inputs[0].bytes, inputs[0].bytes, stage)]
    return launches, made(outputs, stage)


def dynamic_slice(node: Node, inputs: Sequence[Laid], outputs: Sequence[Laid], gpu: Architecture) -> Outcome:
    stage = after(inputs, 2)
    launches = [
        Launch("offset for DynamicSlice", inputs[1].bytes, 8, stage - 1),
        Launch("DynamicSlice", outputs[0].bytes, outputs[0].bytes, stage),
    ]
    return launches, made(outputs, stage)


def sort(node: Node, inputs: Sequence[Laid], outputs: Sequence[Laid], gpu: Architecture) -> Outcome:
    """metal/sort.cpp, where a partition is a whole sort. A row of more than 2048 numbers is sorted in blocks, which are merged in pairs
    with two launches per round, and copied to their place."""
    axis = node.arguments[-1] if node.arguments and isinstance(node.arguments[-1], int) else -1
    size = inputs[0].shape[axis]
    blocks = math.ceil(size / (2048 if inputs[0].dtype.size <= 4 else 1024))
    count = 1 if blocks <= 1 else 2 + 2 * math.ceil(math.log2(blocks))
    width = inputs[0].size * (inputs[0].dtype.size + (4 if blocks > 1 else 0))
    start = after(inputs, 0)
    return [Launch(node.name, width, width, start + i + 1) for i in range(count)], made(outputs, start + count)
