"""Typed access to a GGUF file's hyperparameters: the metadata keys under the name of its architecture.

`finish` refuses the keys that were not asked for, as they may change the maths.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import CheckpointError, UnsupportedModelError
from ...models.config_reader import way_on
from ...util.typed_reader import LARGEST, TypedReader, shown
from .harmless import REFUSED, is_harmless


class HParams(TypedReader):
    """The keys `{arch}.*`. A value of the wrong type is a `CheckpointError`, a value without support an `UnsupportedModelError`."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str, path: Path, written_as: str = "") -> None:
        """`written_as` is the architecture's name in the file, where that is another."""
        self.path = path
        self._prefix = (written_as or architecture) + "."
        prefix = architecture + "."
        self._hparams = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
        super().__init__(self._hparams)

    def error(self, key: str, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {self._prefix}{key} {what}; convert the model again")

    def unsupported(self, key: str, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self.path}: {self._prefix}{key} {what}, which is not supported; {way_on(self._prefix + key)}")

    def optional_integer(self, key: str, default: int | None = None, *, low: float = 1, high: float = LARGEST) -> int | None:
        """A list with one number per layer is accepted where they are all the same."""
        value = self.take(key)
        if isinstance(value, np.ndarray) and value.ndim == 1 and value.size:
            if (value != value[0]).any():
                raise self.unsupported(key, "differs from layer to layer")
            self._hparams[key] = value[0].item()
        return super().optional_integer(key, default, low=low, high=high)

    def optional_number(self, key: str, default: float | None = None) -> float | None:
        """With only the digits that its float32 needs: 1e-05 rather than 9.999999747378752e-06."""
        value = super().optional_number(key, default)
        return None if value is None else short_float(value)

    def per_layer(self, key: str, count: int = 0) -> list[int] | None:
        """A whole number for each of at least `count` layers, or None where the key is not there or holds one for all."""
        value = self.take(key)
        if not isinstance(value, np.ndarray):
            return None
        if value.ndim != 1 or value.size < count or value.dtype.kind not in "iub" or not ((value >= 0) & (value <= LARGEST)).all():
            raise self.error(key, f"must hold a number for each of the {count} layers")
        return [int(number) for number in value]

    def flags(self, key: str, count: int) -> list[bool] | None:
        """One bool for each of `count` layers (more are given where layers are left out), or None where the key is not there."""
        value = self.take(key)
        if value is None:
            return None
        if not isinstance(value, np.ndarray) or value.ndim != 1 or value.size < count:
            raise self.error(key, f"must hold a flag for each of the {count} layers")
        return [bool(flag) for flag in value[:count]]

    def finish(self) -> None:
        """Raise `UnsupportedModelError` for the first key that was not taken and may change the maths."""
        for key, value in self.untaken():
            known = is_harmless(key, value, self._hparams)
            if key in REFUSED:
                raise self.unsupported(key, f"= {shown(value)} {REFUSED[key]}")
            if known is None:
                raise UnsupportedModelError(
                    f"{self.path}: {self._prefix}{key} = {shown(value)} is not understood, and may change the answers; "
                    f"{way_on(self._prefix + key)}"
                )
            if not known:
                raise self.unsupported(key, f"is {shown(value)}")


def short_float(value: float) -> float:
    """The shortest decimal with the same float32; a float64 that no float32 equals stays as it is."""
    with np.errstate(over="ignore"):
        narrow = np.float32(value)
    return float(str(narrow)) if float(narrow) == float(value) else float(value)
