"""Errors of keys and values in a quantized cache, per layer and page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..cache.kv_format import KVFormat
from ..cache.kv_quantization import seal_keys, seal_values, unseal_keys, unseal_values
from ..cache.pages import PAGE
from ..errors import SettingError
from ..interpret.places import KV
from ..util.dataclass import dataclass
from ..util.words import counted
from .frames import frame
from .html import table

if TYPE_CHECKING:
    from ..interpret.trace import Trace


@dataclass(frozen=True, slots=True)
class PageError:
    """Errors of one page of one layer."""

    layer: int
    """Index of the layer."""
    page: int
    """Index of the page in the prompt, from 0."""
    keys: float
    """Relative RMS error of the keys over all heads and channels; 0 at 16 bits."""
    values: float
    """Relative RMS error of the values."""


@dataclass(frozen=True, slots=True)
class CacheErrors:
    """Errors of a prompt's pages in a format."""

    kv: str
    """Format, a value of `LLM(kv=...)`."""
    rows: list[PageError]
    """Errors by layer and page; full pages only."""

    def by_layer(self) -> dict[int, tuple[float, float]]:
        """Return the mean relative errors (keys, values) of each layer."""
        found: dict[int, list[PageError]] = {}
        for row in self.rows:
            found.setdefault(row.layer, []).append(row)
        return {
            layer: (sum(row.keys for row in rows) / len(rows), sum(row.values for row in rows) / len(rows)) for layer, rows in found.items()
        }

    def to_pandas(self) -> Any:
        """Return the rows as a `pandas.DataFrame`. Raises `MLXInferError` without pandas."""
        return frame({"kv": self.kv} | asdict(row) for row in self.rows)

    def _lines(self) -> Iterator[tuple[str, ...]]:
        for layer, (keys, values) in self.by_layer().items():
            yield str(layer), f"{keys:.2%}", f"{values:.2%}"

    def _repr_html_(self) -> str:
        return table(("layer", f"keys, kv {self.kv}", "values"), self._lines())

    def __repr__(self) -> str:
        pages = max((row.page for row in self.rows), default=-1) + 1
        return f"CacheErrors(kv {self.kv}, {counted(pages, 'page')} in {counted(len(self.by_layer()), 'layer')})"


def cache_errors(trace: Trace, kv: str = "4", *, first16: bool = False) -> CacheErrors:
    """Quantize the pages of a traced prompt and compare. The trace needs "kv" (`llm.trace(prompt, what="kv")`).

    Uses the cache's quantizer on normed and rotated keys. Raises `SettingError` for a prompt without a full page of 64 tokens or a trace
    without "kv", `UnsupportedModelError` for an unknown format.
    """
    form = KVFormat.parse(kv, first16=first16)
    pages = len(trace) // PAGE
    if not pages:
        raise SettingError(f"a page is sealed when it has {PAGE} tokens, and this prompt has {len(trace)}: trace a longer one")
    rows: list[PageError] = []
    for layer, (keys, values) in trace[KV].items():
        kept = [_pages(array, pages) for array in (keys, values)]
        with mx.stream(mx.cpu):
            lost = [
                _relative(kept[0], _sealed_keys(kept[0], form.k_bits)),
                _relative(kept[1], _sealed_values(kept[1], form.v_bits)),
            ]
        for page, (of_keys, of_values) in enumerate(zip(*lost, strict=True)):
            exact = first16 and not page
            rows.append(PageError(layer, page, 0.0 if exact else of_keys, 0.0 if exact else of_values))
    return CacheErrors(form.name, rows)


def _pages(array: mx.array, count: int) -> mx.array:
    """Reshape `[T, heads, dim]` to `[heads, count, 64, dim]`."""
    whole = array[: count * PAGE].swapaxes(0, 1)
    return mx.unflatten(whole, 1, (count, PAGE))


def _sealed_keys(keys: mx.array, bits: int) -> mx.array:
    return keys if bits == 16 or keys.shape[-1] % 8 else unseal_keys(seal_keys(keys, bits), bits, mx.float32)


def _sealed_values(values: mx.array, bits: int) -> mx.array:
    dim = values.shape[-1]
    return values if bits == 16 or dim % 8 else unseal_values(seal_values(values, bits), bits, dim, mx.float32)


def _relative(exact: mx.array, found: mx.array) -> list[float]:
    """Return one error per page of two arrays `[heads, pages, 64, dim]`."""
    lost, size = (mx.square(x).sum(axis=(0, 2, 3)) for x in (found - exact, exact))
    errors: Any = mx.sqrt(lost / mx.maximum(size, 1e-30)).tolist()
    return [float(error) for error in errors]
