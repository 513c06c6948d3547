"""Chooses an attention backend per layer; Metal kernels are trusted only after a trial on this machine, and until one of them fails."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence

import mlx.core as mx

from ... import kernels_cpu
from ...errors import MLXInferError, UnsupportedShapeError
from ...kernels_metal import executors
from ...util.device import default_dtype, is_gpu
from ..base import AttentionSpec, LayerSpec
from ..kv_format import KVFormat, by_layers
from ..store import LayerStore
from .native import AttentionBackend, NativeAttention
from .native_shared import SharedNative
from .reference import PlainAttention

_NATIVE = NativeAttention()
_NATIVE_SHARED = SharedNative()
_PLAIN = PlainAttention()
_SHARED = PlainAttention("other layers read its pages, for which there is no kernel")
_LATENT = PlainAttention("its values are a part of its keys, for which there is no kernel")
_HEAD = PlainAttention("it leaves out the first token, for which there is no kernel")


def attention_backend(store: LayerStore) -> AttentionBackend:
    """The backend for a layer. Layers with equal backends are prepared together in each step."""
    if store.spec.skips_first:
        return _HEAD
    if kernels_cpu.in_use():
        return _NATIVE_SHARED if store.spec.shared else _NATIVE
    if store.spec.shared:
        return _SHARED
    if store.keys_alone:
        return _LATENT if has_gpu_kernels() else _PLAIN
    if not has_gpu_kernels():
        return _PLAIN
    from .metal import METAL

    instead = why_unsupported(store.spec, store.dtype, store.format)
    return PlainAttention(instead) if instead else METAL


def fallback_lines(layers: Sequence[LayerSpec], kv: KVFormat, dtype: mx.Dtype) -> list[str]:
    """Which layers do not use this device's kernels, and why."""
    ways = {
        index: backend.instead for index, backend in _ways(layers, kv, dtype) if isinstance(backend, PlainAttention) and backend.instead
    }
    return [f"attention of {line}: plain MLX instead" for line in by_layers(ways)]


def gpu_status() -> str:
    """Whether the GPU kernels work on this machine; empty where there is no GPU."""
    if not has_gpu_kernels():
        return ""

    usual = AttentionSpec(8, 128, 128, query_heads=32)
    instead = why_unsupported(usual, default_dtype(), KVFormat(4, 4))
    return f"attention in plain MLX: {instead}" if instead else "attention by this project's kernels, which have passed their trial"


def attention_lines(layers: Sequence[LayerSpec], kv: KVFormat, dtype: mx.Dtype) -> list[str]:
    """Which layers use which backend."""
    return by_layers({index: backend.name for index, backend in _ways(layers, kv, dtype)})


def _ways(layers: Sequence[LayerSpec], kv: KVFormat, dtype: mx.Dtype) -> Iterator[tuple[int, AttentionBackend]]:
    for index, spec in enumerate(layers):
        if isinstance(spec, AttentionSpec):
            yield index, attention_backend(LayerStore(spec, dtype, kv))


def has_gpu_kernels() -> bool:
    """Whether MLX computes on a GPU that runs the kernels, be they switched off or not."""
    return is_gpu() and executors.available()


SWITCH = "MLXINFER_METAL_KERNELS"


def why_unsupported(spec: AttentionSpec, dtype: mx.Dtype, form: KVFormat) -> str | None:
    """Why the kernels are not used for such layers; None where they are."""
    if os.environ.get(SWITCH) == "0":
        return f"Metal kernels are switched off by {SWITCH}=0"
    from ...kernels_metal.paged_attention.tiles import Shape, check_shape
    from .trial import kind_of, obstacle

    heads = spec.query_heads or spec.kv_heads
    try:
        check_shape(Shape(dtype, heads, spec.kv_heads, spec.key_dim, spec.value_dim, form.k_bits, form.v_bits))
    except UnsupportedShapeError as error:
        return str(error)
    return obstacle(kind_of(spec, dtype, form))


def may_be_kernels(error: BaseException) -> bool:
    """Whether a step with this error may have failed because of a GPU kernel."""
    return isinstance(error, (RuntimeError, ValueError)) and not isinstance(error, MLXInferError) and not _NO_MEMORY.search(str(error))


def give_up_kernels(backends: Iterable[tuple[LayerStore, AttentionBackend]], error: BaseException) -> bool:
    """A step of layers with these backends has failed. If GPU kernels may be to blame, `attention_backend` does not choose them again for
    such layers, and the step can be tried once more; otherwise False."""
    if not may_be_kernels(error):
        return False
    stores = [store for store, backend in backends if not isinstance(backend, (NativeAttention, PlainAttention))]
    if not stores:
        return False
    from .trial import blame, kind_of

    blame(list(dict.fromkeys(kind_of(store.spec, store.dtype, store.format) for store in stores)), error)
    return True


_NO_MEMORY = re.compile("malloc|memory", re.IGNORECASE)
"""In errors of MLX that plain MLX, which needs more memory, would not avoid."""
