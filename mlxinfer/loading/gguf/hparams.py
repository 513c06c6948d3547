"""Typed access to a GGUF file's hyperparameters: the metadata keys under the name of its architecture.

`finish` refuses the keys that were not asked for, as they may change the maths.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import CheckpointError, UnsupportedModelError
from ...typed_reader import LARGEST, TypedReader, shown

_ANY = object()
_HARMLESS: Mapping[str, tuple[object, ...]] = {
    "vocab_size": (_ANY,),
    "rope.scaling.finetuned": (_ANY,),
    "tensor_data_layout": (_ANY,),
    "pooling_type": (_ANY,),
    "attention.causal": (True,),
    "use_parallel_residual": (False,),
    "expert_shared_count": (0,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_weights_scale": (0.0, 1.0),
    "expert_weights_norm": (True,),
    "expert_gating_func": (1,),
}
"""Keys that change nothing, with the values for which that is true."""


class HParams(TypedReader):
    """The keys `{arch}.*`. A value of the wrong type is a `CheckpointError`, a value without support an `UnsupportedModelError`."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str, path: Path, ignored: Collection[str] = ()) -> None:
        """`ignored` keys are read as if the file did not have them; each is named with or without the architecture."""
        self.path = path
        self._prefix = architecture + "."
        found = {key.removeprefix(self._prefix): value for key, value in metadata.items() if key.startswith(self._prefix)}
        self.ignored = tuple(self._prefix + key for key in found if not {key, self._prefix + key}.isdisjoint(ignored))
        """The whole names of the keys that the file has, and that were ignored."""
        self._hparams = {key: value for key, value in found.items() if self._prefix + key not in self.ignored}
        super().__init__(self._hparams)

    def error(self, key: str, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {self._prefix}{key} {what}; convert the model again")

    def unsupported(self, key: str, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self.path}: {self._prefix}{key} {what}, which is not supported (--ignore-config-key {self._prefix}{key} leaves the key out)"
        )

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
            if key not in _HARMLESS:
                raise UnsupportedModelError(
                    f"{self.path}: {self._prefix}{key} = {shown(value)} is not understood, and may change the answers; "
                    f"if it does not, go on with --ignore-config-key {self._prefix}{key}"
                )
            allowed = _HARMLESS[key]
            if _ANY not in allowed and (isinstance(value, (list, np.ndarray)) or value not in allowed):
                raise self.unsupported(key, f"is {shown(value)}")


def short_float(value: float) -> float:
    """The shortest decimal with the same float32; a float64 that no float32 equals stays as it is."""
    narrow = np.float32(value)
    return float(str(narrow)) if float(narrow) == float(value) else float(value)
