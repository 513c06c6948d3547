"""Takes it for granted that kernels pass their trials: on a GPU that computes nothing, none could."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

from mlxinfer.errors import UnsupportedShapeError


@contextmanager
def trusted_kernels() -> Iterator[None]:
    """Every kernel is used for every shape that it supports."""
    with ExitStack() as stack:
        stack.enter_context(patch("mlxinfer.cache.attention.select.why_unsupported", _supported))
        if find_spec("mlxinfer.nn.kernel_trial"):
            stack.enter_context(patch("mlxinfer.nn.kernel_trial.KernelTrial._tried", _runs))
        if find_spec("mlxinfer.nn.small_batch_matmul"):
            products = import_module("mlxinfer.nn.small_batch_matmul")
            stack.enter_context(patch.object(products, "_choices", _AllVariants(products)))
        yield


def _supported(*_: Any) -> None:
    return None


def _runs(trial: Any, kind: tuple[Any, ...]) -> str | None:
    """Why there is no kernel for this kind; what it answers does not matter."""
    try:
        trial._run(*kind)
    except UnsupportedShapeError as error:
        return str(error)
    return None


class _AllVariants(dict[Any, Any]):
    """Says of every format that all variants of the products' kernels are used."""

    def __init__(self, products: Any) -> None:
        super().__init__()
        launcher = import_module("mlxinfer.kernels_metal.quantized_matmul.launcher")
        self._choice = products.Choice(frozenset(launcher.ROWS))

    def __bool__(self) -> bool:
        return True

    def get(self, key: Any, default: Any = None) -> Any:
        return self._choice
