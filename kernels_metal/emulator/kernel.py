"""`metal_kernel`: the interface of `mx.fast.metal_kernel`, run on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from . import build, modes, worker
from .errors import KernelError
from .signature import TYPES, Body, Template, users_files
from .traffic import Launch, Traffic, counting, record

MOST_THREADS = 1024
MOST_BUFFERS = 31


@dataclass(frozen=True)
class Kernel:
    """The result of `metal_kernel`; calling it compiles (once) and runs the kernel."""

    body: Body
    row_contiguous: bool = True
    """Copy inputs that are not row-contiguous, as MLX's `ensure_row_contiguous`."""

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array | float],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Template | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: object = None,
        mode: str | None = None,
        order: str | None = None,
        seed: int | None = None,
    ) -> list[mx.array]:
        """Takes MLX's parameters, and `mode`, `order` and `seed` (`settings` has their defaults).

        Returns evaluated arrays. Raises KernelError, and ValueError for an unknown mode or order. `stream` is ignored.
        """
        chosen = modes.current().but("trace" if counting() else mode, order, seed)
        arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
        shapes = [tuple(shape) for shape in output_shapes]
        size = _checked_launch(self.body, arrays, shapes, output_dtypes, grid, threadgroup)
        code = self.body.code(arrays, output_dtypes, template or ())
        if verbose:
            print(code)  # noqa: T201 - the parameter asks for it
        arguments = self._arguments(arrays, shapes, output_dtypes, init_value)
        request = worker.Request(
            library=build.library(code, self.body.name, chosen.mode),
            grid=grid,
            threadgroup=size,
            order=chosen.order,
            seed=chosen.seed,
            files=users_files(code),
            arguments=arguments,
        )
        answer = worker.launch(chosen.mode, request, chosen.timeout)
        if chosen.mode == "trace":
            self._record(request, answer)
        contents = answer.contents[len(arguments) - len(shapes) :]
        return [_array(*output) for output in zip(contents, shapes, output_dtypes, strict=True)]

    def _arguments(
        self, inputs: Sequence[mx.array], shapes: Sequence[tuple[int, ...]], dtypes: Sequence[mx.Dtype], init_value: float | None
    ) -> list[worker.Argument]:
        found: list[worker.Argument] = []

        def add(name: str, kind: int, content: np.ndarray) -> None:
            bits = content.reshape(-1).view(np.uint8).data if content.size else b""
            found.append(worker.Argument(name, kind, content.nbytes, content.itemsize, bits))

        for name, array in zip(self.body.inputs, inputs, strict=True):
            content, strides = _memory(array, self.row_contiguous)
            add(name, worker.INPUT, content)
            i32, i64 = np.int32, np.int64
            values: dict[str, np.ndarray] = {
                "_shape": np.array(array.shape, i32),
                "_strides": np.array(strides, i64),
                "_ndim": np.array(array.ndim, i32),
            }
            for suffix, _, _ in self.body.extras(name) if array.ndim else ():
                add(name + suffix, worker.INPUT, values[suffix])
        for name, shape, dtype in zip(self.body.outputs, shapes, dtypes, strict=True):
            if init_value is None:
                size = int(np.prod(shape, dtype=np.int64)) * dtype.size
                found.append(worker.Argument(name, worker.OUTPUT, size, dtype.size))
            else:
                add(name, worker.PREFILLED, _numpy(mx.full(shape, init_value, dtype)))
        if len(found) > MOST_BUFFERS:
            raise KernelError("launch", f"{self.body.name}: {len(found)} buffers with shapes and strides, at most {MOST_BUFFERS}")
        return found

    def _record(self, request: worker.Request, answer: worker.Answer) -> None:
        known = {*self.body.inputs, *self.body.outputs}
        buffers = {a.name: Traffic(a.size, *t) for a, t in zip(request.arguments, answer.traffic, strict=True) if a.name in known}
        record(Launch(self.body.name, buffers))


def metal_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
    compile_options: object = None,
) -> Kernel:
    """Like `mx.fast.metal_kernel`. `compile_options` is ignored: arithmetic here is IEEE in every math mode."""
    if not name.isidentifier():
        raise KernelError("launch", f"a kernel's name must be an identifier, not {name!r}")
    if not output_names:
        raise KernelError("launch", f"{name} has no outputs")
    return Kernel(Body(name, tuple(input_names), tuple(output_names), source, header, atomic_outputs), ensure_row_contiguous)


def _checked_launch(
    body: Body,
    inputs: Sequence[mx.array],
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[mx.Dtype],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
) -> tuple[int, int, int]:
    """The threadgroup that MLX dispatches: no wider than the grid. Raises KernelError for what MLX or the GPU rejects."""
    problem = ""
    if len(inputs) != len(body.inputs):
        problem = f"{len(inputs)} inputs for {', '.join(body.inputs) or 'none'}"
    elif not len(shapes) == len(dtypes) == len(body.outputs):
        problem = f"{len(shapes)} output shapes and {len(dtypes)} dtypes for {', '.join(body.outputs)}"
    elif len(grid) != 3 or len(threadgroup) != 3 or min(*grid, *threadgroup) < 1:
        problem = f"grid {grid} and threadgroup {threadgroup} must be three positive numbers each"
    elif unknown := [str(dtype) for dtype in (*(x.dtype for x in inputs), *dtypes) if dtype not in TYPES]:
        problem = f"arrays of {unknown[0]} are not supported"
    else:
        size = (min(grid[0], threadgroup[0]), min(grid[1], threadgroup[1]), min(grid[2], threadgroup[2]))
        if size[0] * size[1] * size[2] <= MOST_THREADS:
            return size
        problem = f"a threadgroup of {size} has {size[0] * size[1] * size[2]} threads, at most {MOST_THREADS}"
    raise KernelError("launch", f"{body.name}: {problem}")


def _numpy(array: mx.array) -> np.ndarray:
    """Convert to numpy; bfloat16, which numpy lacks, becomes its bits as uint16."""
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array, copy=False)


def _memory(array: mx.array, row_contiguous: bool) -> tuple[np.ndarray, tuple[int, ...]]:
    """Memory of an array as a kernel sees it, and its strides in elements."""
    content = _numpy(array)
    if row_contiguous or content.flags.c_contiguous:
        content = np.ascontiguousarray(content)
    strides = tuple(step // content.itemsize for step in content.strides)
    if not content.flags.c_contiguous:
        span = 1 + sum((length - 1) * step for length, step in zip(content.shape, strides, strict=True))
        content = np.lib.stride_tricks.as_strided(content, (span,), (content.itemsize,))
    return content, strides


def _array(content: bytearray, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    bits = mx.uint16 if dtype == mx.bfloat16 else dtype
    kind = np.bool_ if dtype == mx.bool_ else np.dtype(str(bits).rpartition(".")[2])
    array = mx.array(np.frombuffer(content, kind).reshape(shape))
    return array.view(mx.bfloat16) if dtype == mx.bfloat16 else array
