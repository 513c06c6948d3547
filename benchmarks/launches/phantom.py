"""A GPU that computes nothing. Programs run on it as on a Mac, and every graph that they submit is recorded.

The device decides which nodes MLX puts into a graph: a norm is eight operations on the CPU, and one on a GPU. Within `PhantomGPU`, MLX's
Python names report an Apple GPU, and fused operations and Metal kernels become one marked node each. Evaluating records the graph, and
then overwrites the requested arrays with zeros that take no memory. So an 8B model needs no memory, and the host's code is unchanged.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from time import thread_time
from types import TracebackType
from typing import Any, cast
from unittest.mock import patch

import mlx.core as mx

from . import calls
from .graph import Graph, Marked, Node

_FIRST_TAG = 1_500_000_000
"""First int32 of marked nodes. Models do not contain such numbers."""


class PhantomGPU:
    """Context in which programs run as on a Mac.

    Enter it before their modules are imported, because import decides which operations are fused. The process must end with the context.
    `graphs` are the submissions. `syncs` counts waits of the host, `drains` those after which the GPU had nothing left to do. `exposed` is
    the program's processor time between a drain and its next submission. `seconds` is the processor time of recording, less the time of the
    replaced calls of MLX. `recording` can be switched off. `kept` names arrays that survive a submission unrequested, such as a cache.
    """

    def __init__(self) -> None:
        self.graphs: list[Graph] = []
        self.syncs = self.drains = 0
        self.exposed = self.seconds = 0.0
        self.recording = True
        self.kept: Callable[[], Iterator[mx.array]] = lambda: iter(())
        self._marks: dict[int, Marked] = {}
        self._bases: dict[tuple[tuple[int, ...], str], mx.array] = {}
        self._compiled: dict[tuple[Any, ...], tuple[int, tuple[int, ...], mx.Dtype, float] | None] = {}
        self._operation = calls.operation()
        self._tracing = False
        self._held: list[mx.array] = []
        self._born: dict[int, tuple[mx.array, int]] = {}
        self._submitted = self._awaited = 0
        self._drained: float | None = None
        self._patches = contextlib.ExitStack()
        self._eval, self._compile, self._sdpa = mx.eval, mx.compile, mx.fast.scaled_dot_product_attention
        self._delta = mx.fast.gated_delta_update

    def __enter__(self) -> PhantomGPU:
        """Raises RuntimeError without g++. On a CPU, MLX fuses operations only where it can compile them."""
        if shutil.which("g++") is None:
            raise RuntimeError("counting launches needs a C++ compiler called g++, which was not found")
        self._patches.callback(mx.set_default_device, mx.default_device())
        mx.set_default_device(mx.cpu)  # also on a machine with a GPU
        for owner, name, value in self._replacements():
            self._patches.enter_context(patch.object(owner, name, value))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self._patches.close()

    def _replacements(self) -> list[tuple[Any, str, Any]]:
        device, cpu = mx.Device(mx.gpu, 0), mx.Device(mx.cpu, 0)
        make, make_local = mx.new_stream, mx.new_thread_local_stream
        silent: Callable[..., None] = lambda *_, **__: None  # noqa: E731
        return [
            (mx, "default_device", lambda: device),
            (mx.metal, "is_available", lambda: True),
            (mx, "device_info", lambda *_: {"architecture": "applegpu_g16g", "memory_size": 1 << 40}),
            (mx, "new_stream", lambda *_: make(cpu)),
            (mx, "new_thread_local_stream", lambda *_: make_local(cpu)),
            (mx, "set_wired_limit", silent),
            (mx, "synchronize", silent),
            (mx, "clear_cache", silent),
            (mx, "eval", self._evaluate),
            (mx, "async_eval", self._submit),
            (mx, "compile", self._compiling),
            (mx.array, "item", self._reading(mx.array.item)),
            (mx.array, "tolist", self._reading(mx.array.tolist)),
            (mx, "contiguous", lambda a, *_, **__: self._mark(Marked("Contiguous"), [a], [a.shape], [a.dtype])[0]),
            (mx, "dequantize", self._dequantize),
            (mx, "quantize", self._quantize),
            (mx.fast, "rms_norm", self._rms_norm),
            (mx.fast, "layer_norm", self._layer_norm),
            (mx.fast, "rope", self._rope),
            (mx.fast, "scaled_dot_product_attention", self._attention),
            (mx.fast, "gated_delta_update", self._gated_delta),
            (mx.fast, "metal_kernel", self._metal_kernel),
        ]

    # -- submitting and waiting

    def _submit(self, *arrays: Any) -> Graph | None:
        start = thread_time()
        asked = list({id(a): a for a in _leaves(arrays)}.values())
        graph = self._record(asked) if self.recording else None
        if self._drained is not None and (graph is not None or not self.recording):
            self.exposed += start - self.seconds - self._drained
            self._drained = None
        if graph is not None:
            self.graphs.append(graph)
            self._submitted += 1
            self._born.update({id(a): (a, self._submitted) for a in asked})
        # MLX frees a submitted graph as it runs. Here the last one is freed now, and this one at the next submission.
        self._held = [mx.stop_gradient(array) for array in asked]
        self.empty([*asked, *self.kept()])
        self.seconds += thread_time() - start
        return graph

    def _evaluate(self, *arrays: Any) -> None:
        """Submit new graphs, and wait for the last submission, or for an earlier one while the next already runs."""
        asked = list(_leaves(arrays))
        before = max((self._born[id(a)][1] for a in asked if id(a) in self._born), default=0)
        fresh = self._submit(*asked)
        self._wait(before if fresh is None else self._submitted)

    def _wait(self, submission: int) -> None:
        if submission <= self._awaited:
            return
        self._awaited = submission
        self.syncs += 1
        if submission == self._submitted:
            self.drains += 1
            self._drained = thread_time() - self.seconds

    def _reading(self, read: Callable[[mx.array], Any]) -> Callable[[mx.array], Any]:
        """Let `item` and `tolist` wait as `eval` does."""

        def waiting(array: mx.array) -> Any:
            if id(array) in self._born:
                self._wait(self._born[id(array)][1])
            return read(array)

        return waiting

    def empty(self, arrays: Sequence[mx.array]) -> None:
        """Overwrite arrays with zeros that share one element, which drops their graph and memory."""
        for array in arrays:
            if array.size:
                array[...] = mx.zeros((), array.dtype)
        self._eval(list(arrays))

    def _record(self, arrays: list[mx.array]) -> Graph | None:
        graph, constants = Graph(), cast("dict[str, mx.array]", {})

        def tell(part: dict[str, Any]) -> None:
            if part["type"] == "constants":
                constants.update(part["constants"])
            elif part["type"] == "outputs":
                graph.results = [name for name, _, _ in part["outputs"]]
            elif part["type"] == "primitive":
                self._add(graph, part, constants)

        mx.export_function(tell, lambda: arrays)
        return graph if graph.nodes else None

    def _add(self, graph: Graph, part: dict[str, Any], constants: dict[str, mx.array]) -> None:
        for name, shape, dtype in [*part["inputs"], *part["outputs"]]:
            graph.shapes[name] = (tuple(shape), dtype)
        inputs, outputs = ([name for name, _, _ in part[way]] for way in ("inputs", "outputs"))
        mark = None
        if part["name"] == "Depends" and len(inputs) > len(outputs):
            tag = constants.get(inputs[len(outputs)])
            mark = self._marks.get(cast(int, tag.item())) if tag is not None and tag.dtype == mx.int32 and not tag.ndim else None
        if mark is None:
            graph.nodes.append(Node(part["name"], list(part["arguments"]), inputs, outputs, {}))
        else:
            graph.nodes.append(Node(mark.name, [], inputs[len(outputs) + 1 :], outputs, mark.details))

    # -- what a GPU fuses

    def _mark(
        self,
        mark: Marked,
        inputs: Sequence[mx.array],
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[mx.Dtype],
        *,
        start: float | None = None,
        cost: float | None = None,
    ) -> list[mx.array]:
        """Add a node. `start` is the time at which the replaced call began. `cost` is the seconds of MLX's call, by default those of an
        operation."""
        start = thread_time() if start is None else start
        node = self._node(mark, inputs, shapes, dtypes)
        self.seconds += thread_time() - start - (self._operation if cost is None else cost)
        return node

    def _node(
        self, mark: Marked, inputs: Sequence[mx.array], shapes: Sequence[Sequence[int]], dtypes: Sequence[mx.Dtype]
    ) -> list[mx.array]:
        number = _FIRST_TAG + len(self._marks)
        self._marks[number] = mark
        bases = [self._base(tuple(shape), dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        return cast("list[mx.array]", mx.depends(bases, [mx.array(number, mx.int32), *inputs]))

    def _base(self, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        key = shape, str(dtype)
        if key not in self._bases:
            self._bases[key] = mx.broadcast_to(mx.zeros((), dtype), shape)
            self._eval(self._bases[key])
        return self._bases[key]

    def _rms_norm(self, x: mx.array, weight: mx.array | None, eps: float, **_: Any) -> mx.array:
        return self._mark(_RMS_NORM, [x] if weight is None else [x, weight], [x.shape], [x.dtype])[0]

    def _layer_norm(self, x: mx.array, weight: mx.array | None, bias: mx.array | None, eps: float, **_: Any) -> mx.array:
        return self._mark(_LAYER_NORM, [a for a in (x, weight, bias) if a is not None], [x.shape], [x.dtype])[0]

    def _rope(self, a: mx.array, dims: int, *, offset: int | mx.array, freqs: mx.array | None = None, **_: Any) -> mx.array:
        offsets = offset if isinstance(offset, mx.array) else self._base((), mx.int32)
        inputs = [a, offsets] if freqs is None else [a, offsets, freqs]
        return self._mark(Marked("RoPE", {"dims": dims}), inputs, [a.shape], [a.dtype])[0]

    def _attention(self, q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask: Any = None, sinks: Any = None, **_: Any) -> mx.array:
        causal = isinstance(mask, str)
        if not _has_fused_attention(q, k, v):
            return self._sdpa(q, k, v, scale=scale, mask=mask, sinks=sinks)
        arrays = [a for a in (None if causal else mask, sinks) if a is not None]
        details = {"causal": causal, "mask": mask is not None and not causal}
        return self._mark(Marked("SDPA", details), [q, k, v, *arrays], [(*q.shape[:-1], v.shape[-1])], [q.dtype])[0]

    def _gated_delta(
        self, q: mx.array, k: mx.array, v: mx.array, kept: mx.array, beta: mx.array, state: mx.array, **_: Any
    ) -> list[mx.array]:
        """`GatedDeltaUpdate::use_fallback` in mlx/backend/metal/gated_delta_update.cpp: kernels for the heads of some models."""
        heads = k.shape[2], v.shape[2]
        if (k.shape[3], v.shape[3]) != (128, 128) or heads not in _DELTA_HEADS or kept.ndim != 3:
            return self._delta(q, k, v, kept, beta, state)
        return self._mark(_GATED_DELTA, [q, k, v, kept, beta, state], [v.shape, state.shape], [q.dtype, mx.float32])

    def _dequantize(
        self, w: mx.array, /, scales: mx.array, biases: mx.array | None = None, group_size: int | None = None, bits: int | None = None,
        mode: str = "affine", dtype: mx.Dtype | None = None, **_: Any,
    ) -> mx.array:  # fmt: skip
        numbers = w.shape[-1] * 32 // (bits or _DEFAULT_BITS[mode])
        kind = dtype or (scales.dtype if mode == "affine" else mx.bfloat16)
        inputs = [a for a in (w, scales, biases) if a is not None]
        return self._mark(_QUANTIZE, inputs, [(*w.shape[:-1], numbers)], [kind])[0]

    def _quantize(
        self, w: mx.array, /, group_size: int | None = None, bits: int | None = None, mode: str = "affine", **_: Any
    ) -> tuple[mx.array, ...]:
        columns, width, group = w.shape[-1], bits or _DEFAULT_BITS[mode], group_size or _DEFAULT_GROUPS[mode]
        shapes: list[tuple[int, ...]] = [(*w.shape[:-1], columns * width // 32), (*w.shape[:-1], columns // group)]
        dtypes = [mx.uint32, w.dtype if mode == "affine" else mx.uint8]
        if mode == "affine":
            shapes, dtypes = [*shapes, shapes[1]], [*dtypes, w.dtype]
        return tuple(self._mark(_QUANTIZE, [w], shapes, dtypes))

    def _metal_kernel(self, name: str, input_names: Sequence[str], output_names: Sequence[str], *_: Any, **options: Any) -> Any:
        """`mx.fast.metal_kernel`. A launch is one node, with everything that determines its bytes."""
        ensures = bool(options.get("ensure_row_contiguous", True))
        definition = {"name": name, "input_names": input_names, "output_names": output_names, **options}
        source = len(options["source"]) + len(options.get("header", ""))
        costs: dict[int, float] = {}

        def launch(*, inputs: Sequence[Any], grid: Any, threadgroup: Any, template: Any = (), **outputs: Any) -> Any:
            start = thread_time()
            arrays = [a if isinstance(a, mx.array) else mx.array(a) for a in inputs]
            if len(template) not in costs:
                call = {"grid": grid, "threadgroup": threadgroup, "template": template, **outputs}
                costs[len(template)] = calls.kernel(definition, [self._base(tuple(a.shape), a.dtype) for a in arrays], call)
            groups = [-(-whole // part) for whole, part in zip(grid, threadgroup, strict=True)]
            details: dict[str, Any] = {"kernel": name, "names": tuple(input_names), "arrays": arrays, "template": dict(template or ())}
            mark = Marked("CustomKernel", details | {"groups": groups, "ensures": ensures, "source": source})
            shapes, dtypes = outputs["output_shapes"], outputs["output_dtypes"]
            return self._mark(mark, arrays, shapes, dtypes, start=start, cost=costs[len(template)])

        return launch

    def _compiling(self, function: Any = None, *_: Any, **options: Any) -> Any:
        """`mx.compile`: one node if MLX fuses the whole function, otherwise the function itself."""
        if function is None:
            return lambda f: self._compiling(f, **options)
        if options.get("inputs") is not None or options.get("outputs") is not None:
            return function  # random numbers take more than one kernel
        compiled = self._compile(function, shapeless=bool(options.get("shapeless")))

        def call(*arguments: Any, **keywords: Any) -> Any:
            if any(isinstance(a, list) for a in arguments) and not self._tracing:
                return self._replayed(function, compiled, arguments)
            if self._tracing or keywords or not arguments or not all(isinstance(a, mx.array) for a in arguments):
                return function(*arguments, **keywords)
            start = thread_time()
            found = self._fused(compiled, arguments)
            if found is None:
                return function(*arguments)
            kernels, shape, dtype, cost = found
            return self._mark(Marked("Compiled", {"kernels": kernels}), arguments, [shape], [dtype], start=start, cost=cost)[0]

        return call

    def _replayed(self, function: Any, compiled: Any, arguments: Sequence[Any]) -> Any:
        """A function that MLX replays. Its graph is recorded as the function builds it, without additional fusion. Its time is that of the
        replay, including the first trace."""
        if not self.recording:
            return compiled(*arguments)
        before, start = self.seconds, thread_time()
        built = function(*arguments)
        begin = thread_time()
        replay = compiled(*arguments)
        taken = thread_time() - begin
        del replay  # freeing a graph does not count
        self.seconds = before + (thread_time() - start) - taken
        return built

    def _fused(self, compiled: Any, arguments: Sequence[mx.array]) -> tuple[int, tuple[int, ...], mx.Dtype, float] | None:
        """Number of kernels that MLX makes of the function, shape and dtype of the result, and seconds of a call. None if MLX does not fuse
        all of it. Long chains of operations become several kernels."""
        key = (id(compiled), *((tuple(a.shape), str(a.dtype)) for a in arguments))
        if key not in self._compiled:
            self._tracing, bases = True, [self._base(tuple(a.shape), a.dtype) for a in arguments]
            try:
                result, cost = compiled(*bases), calls.compiled(compiled, bases)
            finally:
                self._tracing = False
            names = _primitives(result) if isinstance(result, mx.array) else []
            fuses = bool(names) and all(name.startswith("Compiled") for name in names)
            self._compiled[key] = (len(names), tuple(result.shape), result.dtype, cost) if fuses else None
        return self._compiled[key]


_DEFAULT_BITS = {"affine": 4, "mxfp4": 4, "nvfp4": 4, "mxfp8": 8}
_DEFAULT_GROUPS = {"affine": 64, "mxfp4": 32, "nvfp4": 16, "mxfp8": 32}
_QUANTIZE = Marked("Quantize")
_GATED_DELTA = Marked("GatedDelta")
_DELTA_HEADS = ((24, 24), (32, 32), (16, 32), (16, 48))
"""Key and value heads."""
_RMS_NORM, _LAYER_NORM = Marked("RMSNorm"), Marked("LayerNorm")


def _has_fused_attention(q: mx.array, k: mx.array, v: mx.array) -> bool:
    """`ScaledDotProductAttention::use_fallback` in mlx/backend/metal/scaled_dot_product_attention.cpp, without M5's matrix units."""
    rows, keys, dim = q.shape[2], k.shape[2], q.shape[3]
    if rows > 8:
        return dim == v.shape[3] and dim in (64, 72, 80, 96, 128)
    return dim == v.shape[3] and dim in (64, 96, 128, 256) and rows <= keys and rows * q.shape[1] // k.shape[1] <= 32


def _primitives(result: mx.array) -> list[str]:
    """Names of the primitives of a graph that are not views, from its drawing, because `mx.export_function` refuses compiled primitives."""
    import re
    from io import StringIO

    from .primitives import VIEWS

    text = StringIO()
    mx.export_to_dot(text, result)
    return [name for name in re.findall(r'label ?="(\w+)"', text.getvalue()) if name not in VIEWS]


def _leaves(tree: Any) -> Iterator[mx.array]:
    if isinstance(tree, mx.array):
        yield tree
    elif isinstance(tree, dict):
        yield from _leaves(list(tree.values()))
    elif isinstance(tree, (list, tuple)):
        for each in tree:
            yield from _leaves(each)
