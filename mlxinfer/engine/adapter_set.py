"""The adapters of a running model, loaded and unloaded between two steps within the planned memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from ..config import check_adapter_name
from ..errors import AdapterError, MemoryPlanError
from ..loading.load import LoadedModel

if TYPE_CHECKING:
    from ..adapters.adapted_model import AdaptedModel, LoadedAdapter
    from ..adapters.update import Adapter


class AdapterSet:
    """Belongs to the thread that computes. Other threads may `open` files and look up names."""

    def __init__(self, loaded: LoadedModel, adapted: AdaptedModel | None, planned: int, take_memory: Callable[[int], int]) -> None:
        """`planned`: bytes for adapters. `take_memory` requests more."""
        self.adapted = adapted
        """The model with its adapters; None without adapters."""
        self.loaded: dict[str, LoadedAdapter] = {} if adapted is None else dict(adapted.adapters)
        """Adapters that requests can use, by name."""
        self._model = loaded
        self._planned = planned
        self._take_memory = take_memory

    def open(self, name: str, path: str | Path) -> Adapter:
        """Read an adapter's headers, for `load`; the caller closes it. Raises `SettingError` for an invalid name, `AdapterError`."""
        from ..adapters.files import open_adapter

        check_adapter_name(name)
        try:
            return open_adapter(name, path, self._model.config)
        except OSError as error:
            raise AdapterError(f"the adapter {name!r} cannot be read: {error.strerror or error}") from None

    def _check_not_divided(self) -> None:
        if getattr(self._model.model, "divided", False):
            raise AdapterError("the model runs on several machines, whose adapters stay as they were at the start: restart with --adapter")

    def load(self, adapter: Adapter) -> None:
        """Load it for requests. After `AdapterError` or `MemoryPlanError` nothing has changed."""
        self._check_not_divided()
        if adapter.name in self.loaded:
            raise AdapterError(f"there is an adapter called {adapter.name!r} already: unload it first, or give this one another name")
        from ..adapters.adapted_model import AdaptedModel

        adapted = self.adapted or AdaptedModel(self._model.model, (), self._model.dtype)
        self._check_memory(adapted.bytes_with(adapter))
        try:
            adapted.load(adapter)
        except OSError as error:
            raise AdapterError(f"the adapter {adapter.name!r} cannot be read: {error.strerror or error}") from None
        self.adapted = adapted
        self.loaded[adapter.name] = adapted.adapters[adapter.name]

    def unload(self, name: str) -> None:
        """Refuse further requests for it. Its memory is freed after the last request that uses it. Raises `AdapterError`."""
        self._check_not_divided()
        if self.adapted is None or name not in self.loaded:
            known = f"there are {', '.join(self.loaded)}" if self.loaded else "the model has none"
            raise AdapterError(f"no adapter called {name!r} is loaded; {known}")
        self.adapted.unload(name)
        del self.loaded[name]

    def _check_memory(self, wanted: int) -> None:
        """Raise `MemoryPlanError` unless all adapters together may take `wanted` bytes."""
        if wanted > self._planned:
            self._planned += self._take_memory(wanted - self._planned)
        if wanted > self._planned:
            raise MemoryPlanError(
                f"the model's adapters would take {wanted / 1e6:.3g} MB, and {self._planned / 1e6:.3g} MB are planned for them: "
                "load the model with more adapter_memory_gb (--adapter-memory), or unload others"
            )


def load_into(adapters: AdapterSet, name: str, path: str | Path, change: Callable[[Callable[[], None]], object]) -> None:
    """Open an adapter, and load it inside `change`, between two steps. Raises the errors of `AdapterSet.open` and `load`."""
    with closing(adapters.open(name, path)) as adapter:
        change(lambda: adapters.load(adapter))
