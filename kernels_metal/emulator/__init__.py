"""Runs `mx.fast.metal_kernel` kernels on a CPU, under sanitizers; see README.md."""

from .compare import compare_signature, mlx_source
from .errors import KINDS, KernelError, Unavailable
from .kernel import Kernel, metal_kernel
from .modes import MODES, ORDERS, settings
from .toolchain import INSTALL, available, why_not
from .traffic import Counts, Launch, Traffic, count_bytes

__all__ = [
    "INSTALL",
    "KINDS",
    "MODES",
    "ORDERS",
    "Counts",
    "Kernel",
    "KernelError",
    "Launch",
    "Traffic",
    "Unavailable",
    "available",
    "compare_signature",
    "count_bytes",
    "metal_kernel",
    "mlx_source",
    "settings",
    "why_not",
]
