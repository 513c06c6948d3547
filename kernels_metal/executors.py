"""Selects the executor of the kernels: a Mac's GPU, an NVIDIA GPU through the CUDA twin, or on request the emulator.

`MLXINFER_KERNELS=emulator` requests the emulator for a process, `run_with` for a block of code.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import field
from functools import cache
from typing import Any, Protocol, Union, cast

import mlx.core as mx

from ..util.dataclass import dataclass
from ..util.device import device_info, has_metal
from .source import load

Template = Sequence[tuple[str, Union[bool, int, mx.Dtype]]]


class Kernel(Protocol):
    """The result of `mx.fast.metal_kernel`. `grid` counts threads, not threadgroups."""

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Template = (),
    ) -> list[mx.array]: ...


Maker = Callable[..., Kernel]
NEEDED = "Metal kernels need an Apple GPU, an NVIDIA GPU and mlx[cuda], or the emulator"
"""Message where kernels cannot run."""
_maker: ContextVar[Maker | None] = ContextVar("kernel maker", default=None)


@dataclass(slots=True)
class Launch:
    """A kernel and all arguments of its launch except inputs. Computed once for each set of shapes, because every step launches the same
    hundreds of kernels."""

    file: str
    """Name of the Metal file."""
    name: str
    """Name of the kernel in the file."""
    template: Template
    shapes: Sequence[Sequence[int]]
    """Of the outputs, as `dtypes`."""
    dtypes: Sequence[mx.Dtype]
    grid: tuple[int, int, int]
    """Threads in all."""
    threadgroup: tuple[int, int, int]
    _made: tuple[Maker | None, Kernel] | None = field(default=None, init=False, repr=False, compare=False)
    """The kernel, and the maker that `run_with` had set when the kernel was made."""

    def run(self, inputs: Sequence[mx.array]) -> list[mx.array]:
        """Launch it, and return its outputs. Raises RuntimeError where kernels cannot run."""
        maker, made = _maker.get(), self._made
        if made is None or made[0] is not maker:
            made = self._made = maker, get_kernel(self.file, self.name)
        return made[1](
            inputs=inputs,
            template=self.template,
            output_shapes=self.shapes,
            output_dtypes=self.dtypes,
            grid=self.grid,
            threadgroup=self.threadgroup,
        )


@contextlib.contextmanager
def run_with(maker: Maker) -> Iterator[None]:
    """Within the context, `maker` makes the kernels. It takes the arguments of `mx.fast.metal_kernel`."""
    token = _maker.set(maker)
    try:
        yield
    finally:
        _maker.reset(token)


def available() -> bool:
    """True if the kernels of this folder can run here."""
    return current_maker() is not None


def kind() -> str:
    """Return the executor of this process: "Metal", "CUDA" or "emulator"; "" without one, or within `run_with`."""
    maker = None if _maker.get() else current_maker()
    if maker is None:
        return ""
    return "Metal" if maker is mx.fast.metal_kernel else "emulator" if maker.__module__.endswith("emulator.kernel") else "CUDA"


def measurable() -> bool:
    """True if the executor of this process is a GPU, whose speed decides whether a kernel is used."""
    return kind() in ("Metal", "CUDA")


def traceable() -> bool:
    """True if kernels may be called while MLX traces a function: they are operations of MLX, and no code reads their inputs."""
    maker = current_maker()
    return maker is mx.fast.metal_kernel or getattr(maker, "traceable", False)


def get_kernel(file: str, name: str) -> Kernel:
    """The kernel of a Metal file, made once per executor. Raises RuntimeError where kernels cannot run."""
    maker = current_maker()
    if maker is None:
        raise RuntimeError(NEEDED)
    return _made(maker, file, name)


def current_maker() -> Maker | None:
    """Return the maker of kernels, or None where kernels cannot run. MLX's own makers fail only at the first call, so this checks for a
    GPU beforehand.

    It runs at every launch, so the check for a Mac comes first.
    """
    maker = _maker.get()
    if maker is not None:
        return maker
    if has_metal():
        return cast(Maker, mx.fast.metal_kernel)
    if os.environ.get("MLXINFER_KERNELS") == "emulator":
        return _emulated()
    if mx.cuda.is_available():
        from .cuda import CudaKernel

        return CudaKernel
    return None


def _emulated() -> Maker:
    """The emulator, imported on request only. Raises RuntimeError where the package has none: wheels leave it out."""
    try:
        from . import emulator
    except ImportError as error:
        raise RuntimeError("MLXINFER_KERNELS=emulator needs a checkout of mlxinfer (pip install -e .): wheels have no emulator") from error
    return emulator.metal_kernel


@cache
def _made(maker: Maker, file: str, name: str) -> Kernel:
    source = load(file, name)
    return maker(name=name, input_names=list(source.inputs), output_names=list(source.outputs), source=source.body, header=source.header)


_CORES = {"g": 10, "s": 32, "c": 64, "d": 64}
"""GPU cores of a chip by the last letter of its architecture: base, Max (and Pro), Ultra. MLX does not report the number."""


_MULTIPROCESSORS = 128
"""Multiprocessors of a large NVIDIA GPU (an H100 has 132)."""


@cache
def gpu_cores() -> int:
    """Approximate number of GPU cores. It decides the number of parts of a long sequence."""
    if mx.cuda.is_available():
        return _MULTIPROCESSORS
    information: dict[str, Any] = device_info()
    return _CORES.get(str(information.get("architecture", "g"))[-1], 10)
