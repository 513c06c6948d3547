"""Native operations for MLX's CPU backend, evaluated lazily on its stream like MLX's own.

They are compiled when mlxinfer is installed, where a C++ compiler is present, and for one version of MLX. Importing this package
costs nothing and never fails; `available()` says whether the operations can be called and `status()` why not. README.md describes
how an operation is added.
"""

from __future__ import annotations

from .native import available, isa_name, status, thread_count
from .operations import silu_multiply
from .packed import PRECISIONS, Packed, default_precision, pack

__all__ = ["PRECISIONS", "Packed", "available", "default_precision", "isa_name", "pack", "silu_multiply", "status", "thread_count"]
