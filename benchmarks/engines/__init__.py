"""The engines that are compared. A worker imports only the engine that it runs."""

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
"""Modules by the engines' names in results. `mlxinfer-plain` is this project without its CPU kernels. `mlxinfer-first` is this project
without packed copies of models, as at a first start."""

ENVIRONMENT = {"mlxinfer-plain": {"MLXINFER_CPU_KERNELS": "0"}, "mlxinfer-first": {"MLXINFER_PACKED_GB": "0"}}


def create(name: str) -> Engine:
    """Create an engine, or for another name one without a model. Raises ImportError if the engine is not installed."""
    engine: Engine = import_module(f".{MODULES[name]}", __name__).create() if name in MODULES else Engine()
    return engine
