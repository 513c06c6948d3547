"""Chooses an attention backend per layer. Metal kernels are used only after a trial on this machine, and until one of them fails."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence

import mlx.core as mx

from ... import kernels_cpu
from ...errors import MLXInferError, UnsupportedShapeError
from ...kernels_metal.kernel_trial import SWITCH, has_gpu_kernels
from ...util.device import default_dtype
from ...util.gpu_fault import GpuFault, gpu_fault
from ..base import PAGE, AttentionParams, AttentionSpec, HeadSteps, LayerSpec, Segment
from ..kv_format import KVFormat, by_layers
from ..pages import AttentionGroup
from ..store import LayerStore
from .head_steps import ready_queries
from .native import AttentionBackend, Full, NativeAttention, NativeStep
from .reference import Attended, PlainAttention, PlainStep, joined_rows


class SharedNative(NativeAttention):
    """The native CPU operation for layers whose pages other layers also read. Whole blocks read them in one operation. Elsewhere the
    other layers attend in plain MLX."""

    def begin(self, segments: tuple[Segment, ...], group: AttentionGroup) -> SharedStep:
        return SharedStep(segments, super().begin(segments, group).plan, group)

    def joins_past(self, store: LayerStore) -> bool:
        return True


class SharedStep(NativeStep):
    """A step of `SharedNative`."""

    def __init__(self, segments: tuple[Segment, ...], plan: kernels_cpu.AttentionPlan, group: AttentionGroup) -> None:
        super().__init__(segments, plan)
        self._plain = PlainStep(segments, group)
        self._seen: dict[LayerStore, list[Attended]] = {}

    def heads(self, store: LayerStore, qkv: tuple[mx.array, mx.array, mx.array], params: AttentionParams) -> tuple[mx.array, Full]:
        """Open pages are written in place, so rows that other layers need from pages that become full are copied first."""
        before = [store.open_rows(s.slot, s.past % PAGE) if s.filled and s.past % PAGE else [] for s in self.segments]
        copies = [a for rows in before for a in rows]
        if copies:
            q, k, v = mx.depends(list(qkv), copies)
            qkv = q, k, v
        answers, full = super().heads(store, qkv, params)
        self._seen[store] = [self._attended(store, s, rows, qkv[1:], full) for s, rows in zip(self.segments, before, strict=True)]
        return answers, full

    def again(self, store: LayerStore, rows: mx.array, heads: HeadSteps, params: AttentionParams) -> mx.array:
        """See `base.Step.attend_again`."""
        q = ready_queries(rows, store.spec, heads)
        outputs = [
            attended.answers(q[s.start : s.start + s.count].swapaxes(0, 1), params, None).swapaxes(0, 1)
            for s, attended in zip(self.segments, self._seen[store], strict=True)
        ]
        return joined_rows(outputs)

    def _attended(self, store: LayerStore, segment: Segment, before: Sequence[mx.array], kv: Sequence[mx.array], full: Full) -> Attended:
        tails = [a[segment.slot][:, None] for a in store.open]
        if segment.filled:
            rows = [a[segment.start : segment.start + segment.count].swapaxes(0, 1) for a in kv]
            tails = [
                _pages(mx.concatenate([*first, new], axis=1)) for first, new in zip([[a] for a in before] or [[], []], rows, strict=True)
            ]
        return self._plain.attended(store, segment, (tails[0], tails[1]), full)


def _pages(rows: mx.array) -> mx.array:
    """`[Hkv, n, D]` to pages `[Hkv, n / 64, 64, D]`, the last one filled up."""
    missing = -rows.shape[1] % PAGE
    return mx.pad(rows, [(0, 0), (0, missing), (0, 0)]).reshape(rows.shape[0], -1, PAGE, rows.shape[-1])


_NATIVE = NativeAttention()
_NATIVE_SHARED = SharedNative()
_PLAIN = PlainAttention()
_LATENT = PlainAttention("its values are a part of its keys, for which there is no kernel")
_HEAD = PlainAttention("it leaves out the first token, for which there is no kernel")


def attention_backend(store: LayerStore) -> AttentionBackend:
    """Return the backend for a layer. Layers with equal backends are prepared together in each step."""
    if store.spec.skips_first:
        return _HEAD
    if kernels_cpu.in_use():
        return _NATIVE_SHARED if store.spec.shared else _NATIVE
    if store.keys_alone:
        return _LATENT if has_gpu_kernels() else _PLAIN
    if not has_gpu_kernels():
        return _PLAIN
    return gpu_backend(store.spec, store.dtype, store.format)


def gpu_backend(spec: AttentionSpec, dtype: mx.Dtype, form: KVFormat) -> AttentionBackend:
    """Return the backend of such layers on a GPU, whose kernels are tried first."""
    from .metal import METAL, MetalAttention
    from .trial import DECODE_TRIAL, PREFILL_TRIAL, UNSEAL_TRIAL, kind_of

    instead, kind = why_unsupported(spec, dtype, form), kind_of(spec, dtype, form)
    if instead:
        verdict = DECODE_TRIAL.verdicts.get(kind)
        return PlainAttention(instead, faster=verdict is not None and verdict.obstacle == instead and verdict.quiet)
    lost = PREFILL_TRIAL.obstacle(*kind) if form.quantized else None
    return MetalAttention(lost, unseals=UNSEAL_TRIAL.obstacle(*kind) is None) if lost else METAL


def fallback_lines(layers: Sequence[LayerSpec], kv: KVFormat, dtype: mx.Dtype) -> list[str]:
    """List the layers that do not use this device's kernels, with reasons."""
    lost = {index: instead for index, backend in _backends_of(layers, kv, dtype) if (instead := _instead(backend))}
    return [f"attention of {line}" for line in by_layers(lost)]


def _instead(backend: AttentionBackend) -> str:
    """Return what replaces a backend's kernels, with the reason; "" if nothing does, or if it is faster."""
    if isinstance(backend, PlainAttention):
        return f"{backend.instead}: plain MLX instead" if backend.instead and not backend.faster else ""
    lost = getattr(backend, "prefill_lost", "")
    return f"{lost}: plain MLX instead for prompts; decode keeps its kernels" if lost else ""


def gpu_status() -> str:
    """Describe how this machine's GPU computes attention; "" without a GPU."""
    if not has_gpu_kernels():
        return ""
    usual = AttentionSpec(8, 128, 128, query_heads=32)
    backend = gpu_backend(usual, default_dtype(), KVFormat(4, 4))
    if isinstance(backend, PlainAttention):
        return f"attention in plain MLX: {backend.instead}"
    lost = getattr(backend, "prefill_lost", "")
    if lost:
        return f"attention of decode by this project's kernels, which have passed their trial; of prompts in plain MLX: {lost}"
    return "attention by this project's kernels, which have passed their trial"


def usual_decode_lines() -> list[str]:
    """Measure attention of one row for usual heads on this machine's GPU; empty without one. The last of the lines compares the kernel with
    MLX's attention alone."""
    if not has_gpu_kernels():
        return []
    from .decode_choice import TOKENS, on_joined_keys

    usual, dtype, form = AttentionSpec(8, 128, 128, query_heads=32), default_dtype(), KVFormat()
    speed = None if why_unsupported(usual, dtype, form) else on_joined_keys(usual, dtype, form)
    alone = f"attention to {TOKENS} tokens: {speed.times_mlx:.3g}x MLX's attention to joined keys" if speed else ""
    return [*tried_decode_lines(), *([alone] if alone else [])]


def tried_decode_lines() -> list[str]:
    """Describe attention of one row for each kind of layer that was tried, with its measured speed."""
    from .trial import DECODE_TRIAL

    return DECODE_TRIAL.described()


def attention_lines(layers: Sequence[LayerSpec], kv: KVFormat, dtype: mx.Dtype) -> list[str]:
    """List the backends with their layers."""
    return by_layers({index: backend.name for index, backend in _backends_of(layers, kv, dtype)})


def _backends_of(layers: Sequence[LayerSpec], kv: KVFormat, dtype: mx.Dtype) -> Iterator[tuple[int, AttentionBackend]]:
    for index, spec in enumerate(layers):
        if isinstance(spec, AttentionSpec):
            yield index, attention_backend(LayerStore(spec, dtype, kv))


def why_unsupported(spec: AttentionSpec, dtype: mx.Dtype, form: KVFormat) -> str | None:
    """Return the reason why such layers use plain MLX alone; None if decode's kernels are used."""
    if os.environ.get(SWITCH) == "0":
        return f"Metal kernels are switched off by {SWITCH}=0"
    from ...kernels_metal.paged_attention.tiles import Shape, check_shape
    from .trial import DECODE_TRIAL, kind_of

    heads = spec.query_heads or spec.kv_heads
    try:
        check_shape(Shape(dtype, heads, spec.kv_heads, spec.key_dim, spec.value_dim, form.k_bits, form.v_bits))
    except UnsupportedShapeError as error:
        return str(error)
    return DECODE_TRIAL.obstacle(*kind_of(spec, dtype, form))


def may_be_kernels(error: BaseException) -> bool:
    """True if a GPU kernel may have caused this error of a step."""
    return isinstance(error, (RuntimeError, ValueError)) and not isinstance(error, MLXInferError) and not _plain_fails_too(error)


def disable_attention_kernels(backends: Iterable[tuple[LayerStore, AttentionBackend]], error: BaseException) -> bool:
    """Disable the kernels for those of these layers that fail a trial now. If all pass, disable them for all of these layers, because the
    culprit is unknown. Return False if a kernel cannot have caused the error, or if all were disabled before."""
    if not may_be_kernels(error):
        return False
    stores = [store for store, backend in backends if not isinstance(backend, (NativeAttention, PlainAttention))]
    if not stores:
        return False
    from .trial import DECODE_TRIAL, TRIALS, kind_of

    kinds = list(dict.fromkeys(kind_of(store.spec, store.dtype, store.format) for store in stores))
    guilty = []
    for trial in TRIALS:
        used = [kind for kind in kinds if (verdict := trial.verdicts.get(kind)) and verdict.obstacle is None]
        guilty.append(trial.disable(error, guilty=True, kinds=used))
    if any(guilty):
        return True
    left = [kind for kind in kinds if (verdict := DECODE_TRIAL.verdicts.get(kind)) is None or verdict.obstacle is None]
    return DECODE_TRIAL.disable(error, guilty=False, kinds=left)


def _plain_fails_too(error: BaseException) -> bool:
    """True for errors that plain MLX would raise too: it needs even more memory, and a GPU aborts work because of other programs."""
    return gpu_fault(error) is GpuFault.OTHERS or GpuFault.MEMORY.value.search(str(error)) is not None
