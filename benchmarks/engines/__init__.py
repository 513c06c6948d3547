"""The engines that are compared, each behind the same four calls. A worker imports the one it runs, and no other."""

from __future__ import annotations

from importlib import import_module

from .base import Engine

MODULES = {
    "mlxinfer": "mlxinfer_engine",
    "mlxinfer-plain": "mlxinfer_engine",
    "mlxinfer-first": "mlxinfer_engine",
    "llama.cpp": "llama_cpp_engine",
    "mlx-lm": "mlx_lm_engine",
}
"""Names as they stand in results. `mlxinfer-plain` is this project without its CPU kernels, `mlxinfer-first` without copies of packed
models: every start of it is a first one."""

ENVIRONMENT = {"mlxinfer-plain": {"MLXINFER_CPU_KERNELS": "0"}, "mlxinfer-first": {"MLXINFER_PACKED_GB": "0"}}


def create(name: str) -> Engine:
    """Raises ImportError where the engine is not installed."""
    engine: Engine = import_module(f".{MODULES[name]}", __name__).create()
    return engine
