"""Format-independent contents of an adapter's file: low-rank updates of projections."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import mlx.core as mx

from ..errors import AdapterError
from ..loading.safetensors import SafetensorsFile
from ..util.dataclass import dataclass

CONFIG = "adapter_config.json"
_IN_LAYER = re.compile(r"(?:(?:model|language_model|text_model|backbone)\.)*(layers\.\d+\..+)")
_MEANT = "only projections of attention and of feed-forward layers can have adapters"
_OTHERS = (
    ("modules_to_save", "a tensor that replaces one of the model's (modules_to_save)"),
    ("embed_tokens", "for the embedding"),
    ("lora_embedding", "for an embedding"),
    ("lm_head", "for the output head"),
    (".experts.", "for experts"),
    (".switch_mlp.", "for experts"),
    ("lora_magnitude_vector", "a magnitude (DoRA), which the adapter's config does not have"),
)


@dataclass(frozen=True, slots=True)
class Factors:
    """Factors of an update in float32."""

    a: mx.array
    """`[rank, in]`."""
    b: mx.array
    """`[out, rank]`."""
    magnitude: mx.array | None = None
    """Length of each row of the updated matrix, `[out]` (DoRA, arXiv:2402.09353); None keeps the lengths."""


@dataclass(frozen=True, slots=True)
class Update:
    """Update `scale * b @ a` of one projection's matrix."""

    key: str
    """Projection: `key_of` its name in the graph."""
    tensor: str
    """Name of `a` in its file, for messages."""
    rank: int
    """Rows of `a`."""
    shape: tuple[int, int]
    """Shape of the projection's matrix, `[out, in]`."""
    scale: float
    """Factor of the product."""
    has_magnitude: bool
    read: Callable[[], Factors]
    """Reads the factors. Raises `AdapterError` for values that are not finite."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """An opened adapter, of which only headers were read."""

    name: str
    """Name in requests."""
    path: Path
    """File or directory."""
    kind: str
    """"PEFT", "mlx-lm" or "GGUF"."""
    digest: str
    """SHA-256 of the weights' bytes and the canonical config, 64 hexadecimal digits."""
    updates: Mapping[str, Update]
    """Updates by `Update.key`."""
    close: Callable[[], None]
    """Closes the files; factors cannot be read afterwards."""


def key_of(name: str) -> str:
    """Return the key of a projection: its name from `layers.`, without prefixes of multimodal models; otherwise the whole name."""
    found = _IN_LAYER.fullmatch(name)
    return found[1] if found else name


_TOWERS = re.compile(r"(^|\.)(vision_tower|vision_model|visual|vision_embedder|embed_vision|multi_modal_projector|connector|mlp1)\.")


def not_applied(path: Path, tensor: str, why: str = "") -> AdapterError:
    """Return the error for a tensor that cannot be applied."""
    if _TOWERS.search(tensor):
        why = "is for the vision tower: only the text model can have adapters"
    if not why:
        reason = next((text for part, text in _OTHERS if part in tensor), "")
        reason = reason or ("a bias" if tensor.endswith(".bias") else "no part of a low-rank update that is known here")
        why = f"is {reason}: {_MEANT}"
    return AdapterError(f"{path}: the tensor {tensor!r} {why}, and it would not be applied")


def for_another_model(path: Path, update: Update, whose: str, shape: tuple[int, ...]) -> AdapterError:
    """Return the error for an update of a matrix with another shape."""
    return AdapterError(
        f"{path}: the tensor {update.tensor!r} belongs to a matrix of {list(update.shape)}, and {whose} has {list(shape)}: the adapter is "
        "for another model"
    )


def check_factors(path: Path, name: str, a: tuple[int, ...], b: tuple[int, ...], magnitude: tuple[int, ...] | None) -> None:
    """Raise `AdapterError` unless the shapes fit `Factors`."""
    if len(a) != 2 or len(b) != 2 or a[0] != b[1] or 0 in (*a, *b):
        stacked = " (stacked matrices are for experts, which cannot have adapters)" if len(a) > 2 or len(b) > 2 else ""
        raise AdapterError(f"{path}: the factors of {name!r} are {list(a)} and {list(b)}, expected [rank, in] and [out, rank]{stacked}")
    if magnitude is not None and magnitude not in ((b[0],), (1, b[0]), (b[0], 1)):
        raise AdapterError(f"{path}: the magnitude of {name!r} is {list(magnitude)}, expected [{b[0]}]")


def finite_factors(path: Path, name: str, a: mx.array, b: mx.array, magnitude: mx.array | None) -> Factors:
    """Return factors in float32. Raises `AdapterError` for NaN and infinities."""
    parts = [part.astype(mx.float32) for part in (a, b, magnitude) if part is not None]
    if not all(mx.isfinite(part).all().item() for part in parts):
        raise AdapterError(f"{path}: {name!r} holds NaN or infinite values; save or download the adapter again")
    return Factors(parts[0], parts[1], parts[2].reshape(-1) if magnitude is not None else None)


class AdapterFormat(Protocol):
    """Names, ranks and scales of an adapter's tensors, from its config."""

    tensor: re.Pattern[str]
    """Expression for tensor names, with the groups `module` and `part`."""
    parts: tuple[str, str, str]
    """Names of an update's parts: both factors and the magnitude."""
    transposed: bool
    """True if factors are stored as `[in, rank]` and `[rank, out]`."""
    dora: bool
    """True if updates have magnitudes."""

    def left_out(self, module: str) -> str:
        """Return the reason why an update of this module cannot be applied, or ""."""
        ...

    def rank(self, module: str) -> int:
        """Return the expected rank of a module's factors."""
        ...

    def scale(self, module: str) -> float:
        """Return the scale of a module's update."""
        ...


def updates_in(path: Path, file: SafetensorsFile, settings: AdapterFormat) -> Iterator[Update]:
    """Yield the updates in a file. Raises `AdapterError` for tensors that cannot be applied."""
    parts: dict[str, dict[str, str]] = {}
    for tensor in file.tensors:
        found = settings.tensor.fullmatch(tensor)
        if found is None or (found["part"] == settings.parts[2] and not settings.dora):
            raise not_applied(path, tensor)
        why = settings.left_out(found["module"])
        if why:
            raise not_applied(path, tensor, why)
        parts.setdefault(found["module"], {})[found["part"]] = tensor
    for module, tensors in parts.items():
        yield _update(path, module, tensors, settings, file)


def _update(path: Path, module: str, tensors: Mapping[str, str], settings: AdapterFormat, file: SafetensorsFile) -> Update:
    wanted = settings.parts if settings.dora else settings.parts[:2]
    missing = [part for part in wanted if part not in tensors]
    if missing:
        raise AdapterError(f"{path}: {module!r} has no {missing[0]}; save or download the adapter again")
    a, b, *rest = (tensors[part] for part in wanted)
    magnitude = rest[0] if rest else None
    of_a, of_b = (file.tensors[tensor].shape[:: -1 if settings.transposed else 1] for tensor in (a, b))
    check_factors(path, module, of_a, of_b, file.tensors[magnitude].shape if magnitude else None)
    rank, expected = of_a[0], settings.rank(module)
    if rank != expected:
        raise AdapterError(f"{path}: the tensor {a!r} has rank {rank}, and {CONFIG} says {expected}")

    def read() -> Factors:
        factors = [file.read(tensor).T if settings.transposed else file.read(tensor) for tensor in (a, b)]
        return finite_factors(path, a, factors[0], factors[1], file.read(magnitude) if magnitude else None)

    return Update(key_of(module), a, rank, (of_b[0], of_a[1]), settings.scale(module), settings.dora, read)
