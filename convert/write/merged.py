"""A checkpoint with an adapter merged into it: tensors are the model's own plus the adapter's updates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

from ...adapters.files import open_adapter
from ...adapters.update import Adapter, Factors, Update, for_another_model, key_of, not_applied
from ...loading.directory import SafetensorsCheckpoint
from ...loading.formats import dtype_name, main_dtype
from ...loading.gguf import GGUFCheckpoint
from ...nn.weights import Dense, Format, Matrix, numbers


def open_merged(path: Path, adapter: str | Path, dtype: mx.Dtype | None) -> MergedDirectory | MergedGGUF:
    """Open the checkpoint at a resolved path with an adapter merged in float32 and rounded to `dtype`, or the checkpoint's dtype if None.

    Raises `MLXInferError` for an adapter that does not fit.
    """
    return MergedDirectory(path, adapter, dtype) if path.is_dir() else MergedGGUF(path, adapter)


class Merge:
    """The updates of an adapter by the checkpoint's tensor names. Quantized projections become plain."""

    def __init__(self, adapter: Adapter, names: Any, shape: Callable[[str], tuple[int, ...]], dtype: mx.Dtype) -> None:
        self.adapter = adapter
        self.dtype = dtype
        by_key = {key_of(name.removesuffix(".weight")): name for name in names if name.endswith(".weight")}
        self.updates: dict[str, Update] = {}
        self._factors: tuple[str, Factors] | None = None
        for key, update in adapter.updates.items():
            name = by_key.get(key)
            if name is None:
                raise not_applied(adapter.path, update.tensor, "is for a matrix that the model does not have")
            if shape(name) != update.shape:
                raise for_another_model(adapter.path, update, name, shape(name))
            self.updates[name] = update

    def rows(self, name: str, own: Matrix, first: int, last: int) -> Dense:
        """Return rows of the merged matrix; `own` has the model's rows."""
        update = self.updates[name]
        if self._factors is None or self._factors[0] != name:
            self._factors = name, update.read()
        factors = self._factors[1]
        merged = numbers(own) + update.scale * (factors.b[first:last] @ factors.a)
        if factors.magnitude is not None:
            merged = merged * (factors.magnitude[first:last] / mx.linalg.norm(merged, axis=1))[:, None]
        merged = merged.astype(self.dtype)
        mx.eval(merged)
        return Dense(merged)


class MergedDirectory(SafetensorsCheckpoint):
    """Implements `Checkpoint` for a directory."""

    def __init__(self, path: Path, adapter: str | Path, dtype: mx.Dtype | None) -> None:
        super().__init__(path)
        self._merge: Merge | None = None
        dtype = dtype or main_dtype(self) or mx.bfloat16
        self._merge = Merge(open_adapter("it", adapter, self.config), self.names(), self.shape, dtype)

    @property
    def adapter(self) -> Adapter:
        """The merged adapter."""
        assert self._merge is not None
        return self._merge.adapter

    def stored(self, name: str) -> Format | mx.Dtype:
        return self._merge.dtype if self._merge and name in self._merge.updates else super().stored(name)

    def kind(self, name: str) -> str:
        return dtype_name(self._merge.dtype) if self._merge and name in self._merge.updates else super().kind(name)

    def unpacked_from(self, name: str) -> str | None:
        return None if self._merge and name in self._merge.updates else super().unpacked_from(name)

    def read(self, name: str) -> Matrix:
        if self._merge and name in self._merge.updates:
            return self.read_rows(name, 0, self.shape(name)[0])
        return super().read(name)

    def read_rows(self, name: str, first: int, last: int) -> Matrix:
        own = super().read_rows(name, first, last)
        return self._merge.rows(name, own, first, last) if self._merge and name in self._merge.updates else own

    def close(self) -> None:
        self.adapter.close()
        super().close()


class MergedGGUF(GGUFCheckpoint):
    """Implements `Checkpoint` for a GGUF file."""

    def __init__(self, path: Path, adapter: str | Path) -> None:
        super().__init__(path)
        self._merge = Merge(open_adapter("it", adapter, self.config), self.names(), self.shape, mx.float32)

    @property
    def adapter(self) -> Adapter:
        """The merged adapter."""
        return self._merge.adapter

    def stored(self, name: str) -> Format | mx.Dtype:
        return self._merge.dtype if name in self._merge.updates else super().stored(name)

    def kind(self, name: str) -> str:
        return "F32" if name in self._merge.updates else super().kind(name)

    def read(self, name: str) -> Matrix:
        own = super().read(name)
        return self._merge.rows(name, own, 0, own.shape[0]) if name in self._merge.updates else own

    def close(self) -> None:
        self.adapter.close()
        super().close()
