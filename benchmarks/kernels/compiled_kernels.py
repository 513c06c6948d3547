"""Compiles the Metal kernels of published models on this machine, each variant once.

The graphs of the models are built without weights, and never computed: this shows the kinds for which each trial of a kernel is requested.
Then the trials run. The first launch of a variant is timed. A variant that the compiler refuses returns zeros, so that the trial goes on
to the next ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from time import perf_counter
from typing import Any
from unittest.mock import patch

import mlx.core as mx

from mlxinfer.cache.attention import trial as attention
from mlxinfer.cache.base import PAGE, Segment
from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.cache.paged import PagedCache
from mlxinfer.kernels_metal import executors, kernel_trial
from mlxinfer.kernels_metal.experts import trial as experts
from mlxinfer.kernels_metal.experts.launcher import Form
from mlxinfer.kernels_metal.kernel_trial import KernelTrial, Kind, Verdict
from mlxinfer.kernels_metal.paged_attention.arrays import sealed_arrays
from mlxinfer.kernels_metal.paged_attention.tiles import Shape
from mlxinfer.kernels_metal.quantized_matmul.launcher import BITS
from mlxinfer.kernels_metal.source import all_kernels
from mlxinfer.kernels_metal.unseal_pages.launcher import SEALED, plan_unseal, unseal_pages
from mlxinfer.loading.weights import EmptyWeights
from mlxinfer.models import Model, build
from mlxinfer.nn import few_row_experts, small_batch_matmul
from mlxinfer.nn.moe import mixture_subject
from mlxinfer.nn.packing import objects
from mlxinfer.nn.weights import Format
from mlxinfer.sampling import top_k_top_p

from .products_gpu import SUBJECTS

_ROWS = (1, 8, PAGE + 6)
"""Rows of the steps whose graphs are built: decode, several tokens at once, and a prompt."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel with its template arguments, and the seconds of its first launch, which compiles it."""

    kernel: str
    template: str
    user: str
    """Trial that launched it first."""
    seconds: float
    error: str | None
    """Whole text of the compiler or the GPU; None if it ran."""

    def line(self) -> str:
        return f"{'refused' if self.error else 'compiled'} {self.seconds:6.2f} s  {self.kernel} {self.template}  ({self.user})"


class Compiler:
    """A maker of kernels for `executors.run_with`, which tells of each variant at its first launch."""

    def __init__(self, maker: executors.Maker, tell: Callable[[Variant], None] = lambda _: None) -> None:
        self.variants: dict[tuple[Any, ...], Variant] = {}
        self.user = ""
        """Name of the running trial."""
        self._maker, self._tell = maker, tell

    def __call__(self, *, name: str, **source: Any) -> executors.Kernel:
        return partial(self._launch, name, self._maker(name=name, **source))

    def _launch(
        self,
        name: str,
        kernel: executors.Kernel,
        *,
        inputs: Sequence[mx.array],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        template: executors.Template = (),
        **threads: Any,
    ) -> list[mx.array]:
        # MLX compiles another source for other dtypes, for inputs of less than 8 numbers, and for scalars.
        kinds = tuple((x.dtype, x.size < 8, x.ndim == 0) for x in inputs)
        key = name, tuple(template), kinds, tuple(output_dtypes)
        launch = partial(kernel, inputs=inputs, output_shapes=output_shapes, output_dtypes=output_dtypes, template=template, **threads)
        if key not in self.variants:
            mx.eval(inputs)
            self.variants[key] = variant = _first_launch(name, _described(template), self.user, launch)
            self._tell(variant)
        if self.variants[key].error:
            return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes)]
        return launch()


def _first_launch(name: str, template: str, user: str, launch: Callable[[], list[mx.array]]) -> Variant:
    begin = perf_counter()
    error = None
    try:
        mx.eval(launch())
    except (RuntimeError, ValueError) as found:
        error = str(found) or type(found).__name__
    return Variant(name, template, user, perf_counter() - begin, error)


def _described(template: executors.Template) -> str:
    return " ".join(f"{name}={str(value).removeprefix('mlx.core.')}" for name, value in template)


def trial_kinds(configs: Iterable[Mapping[str, Any]], formats: Sequence[KVFormat]) -> list[tuple[KernelTrial, Kind]]:
    """Return the trials of kernels that models with these configs request, with their kinds, and products and experts in all formats.

    Trials take turns, so that something is known of each kernel when the run is stopped early.
    """
    asked: dict[tuple[KernelTrial, Kind], None] = {}

    def note(trial: KernelTrial, kind: Kind) -> None:
        asked[trial, kind] = None

    with _as_on_gpu(note):
        for config in configs:
            model = _built(config)
            _build_graphs(model, formats)
            for subject in filter(None, (mixture_subject(part, mx.bfloat16) for part in objects(model))):
                for other in _in_other_formats(subject):
                    note(few_row_experts.TRIAL, (other,))
            note(top_k_top_p.TRIAL, (model.vocab_size,))
    for s in SUBJECTS:
        note(small_batch_matmul.TRIAL, small_batch_matmul.kind_of(Format(s.bits, s.group_size, s.mode), s.dtype, s.gate, s.shape))
    turns: dict[KernelTrial, count[int]] = defaultdict(count)
    return sorted(asked, key=lambda request: next(turns[request[0]]))


@contextmanager
def _as_on_gpu(note: Callable[[KernelTrial, Kind], None]) -> Iterator[None]:
    """Have all trials pass unseen, and kernels return zeros."""

    def passed(trial: KernelTrial, kind: Kind, **_: Any) -> Verdict:
        note(trial, kind)
        return Verdict()

    trials = [*kernel_trial.TRIALS, *attention.TRIALS]
    for trial in trials:
        trial.forget()
    with (
        patch.object(KernelTrial, "_verdict", passed),
        patch.object(kernel_trial, "is_gpu", lambda: True),
        patch("mlxinfer.kernels_cpu.in_use", lambda: False),
        executors.run_with(lambda **_: _zeros),
    ):
        yield
    for trial in trials:
        trial.forget()


def _zeros(*, output_shapes: Sequence[Sequence[int]], output_dtypes: Sequence[mx.Dtype], **_: Any) -> list[mx.array]:
    return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes)]


def _built(config: Mapping[str, Any]) -> Model:
    text = config.get("text_config", config)
    tied = bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings")))
    return build(dict(config), EmptyWeights(Format(4, 64), tied=tied))


def _in_other_formats(subject: experts.Subject) -> Iterator[experts.Subject]:
    """Yield the same experts in each format that published checkpoints have: affine of these bits, mxfp4, and not quantized."""
    for form in (*(Form("affine", bits, 64) for bits in BITS), Form("mxfp4", 4, 32), Form("plain")):
        other = replace(subject, into=form, out=form)
        if not experts.why_unsupported(other):
            yield other


def _build_graphs(model: Model, formats: Sequence[KVFormat]) -> None:
    for kv in formats:
        for rows in _ROWS:
            cache = PagedCache(model.layers, dtype=mx.bfloat16, kv_cache_tokens=16 * PAGE, chunk=4 * PAGE, kv=kv)
            step = cache.begin([Segment(cache.open(), 0, rows, 0, rows)])
            model.logits(model.hidden(mx.zeros((rows,), mx.int32), step)[-1:])


def compile_all(kinds: Iterable[tuple[KernelTrial, Kind]], tell: Callable[[str], None]) -> tuple[list[Variant], list[str]]:
    """Run the trials. Return the variants, and a line for each kind whose kernel is not used. `tell` gets a line per variant.

    Raises RuntimeError where kernels cannot run.
    """
    maker = executors.current_maker()
    if maker is None:
        raise RuntimeError(executors.NEEDED)
    compiler, obstacles = Compiler(maker, lambda variant: tell(variant.line())), []
    with executors.run_with(compiler):
        for trial, kind in kinds:
            compiler.user = f"{trial.name}: {_kind_name(kind)}"
            verdict = trial.problem(kind)
            if verdict is not None:
                obstacles.append(f"{compiler.user}: {verdict.obstacle}")
            if trial is attention.PREFILL_TRIAL:
                _unseal(*kind)
    return list(compiler.variants.values()), obstacles


def _unseal(spec: Any, dtype: mx.Dtype, form: KVFormat) -> None:
    """Dequantize a page, which no trial of kernels that pass does."""
    if form.quantized:
        shape = Shape(dtype, spec.query_heads, spec.kv_heads, spec.key_dim, spec.value_dim, form.k_bits, form.v_bits)
        pool = [mx.zeros(size, kind) for size, kind in sealed_arrays(shape, 1)]
        unseal_pages(pool, [], [], [], plan_unseal([(SEALED, 0)], (1, 0, 0, 0)), shape)


def _kind_name(kind: Kind) -> str:
    """Return a kind in one short line: of data classes, what is neither None nor False."""
    return ", ".join(" ".join(_words(part)) for part in kind if part != "")


def _words(part: Any) -> Iterator[str]:
    fields = getattr(part, "__dataclass_fields__", None)
    if fields is None:
        yield str(part).removeprefix("mlx.core.")
        return
    for name in fields:
        value = getattr(part, name)
        if value is not None and value is not False:
            yield f"{name}={value}"


def table(variants: Sequence[Variant]) -> str:
    """Markdown: a row per kernel of this project, also for those that were not launched."""
    rows = ["| kernel | variants | compiled | refused | slowest s | all s |", "| --- | ---: | ---: | ---: | ---: | ---: |"]
    for kernel in all_kernels():
        own = [v for v in variants if v.kernel == kernel]
        refused = sum(v.error is not None for v in own)
        seconds = [v.seconds for v in own] or [0.0]
        rows.append(f"| {kernel} | {len(own)} | {len(own) - refused} | {refused} | {max(seconds):.2f} | {sum(seconds):.1f} |")
    return "\n".join(rows) + "\n"
