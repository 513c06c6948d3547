"""Findings of `mlxinfer doctor`."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ... import kernels_cpu
from ..._version import __version__
from ...cache.attention.select import attention_lines, gpu_status, tried_decode_lines, usual_decode_lines
from ...cache.kv_format import KVFormat, layer_lines
from ...cache.paged import PagedCache
from ...engine.runner.replay_check import replay_lines, replays_file
from ...errors import DraftError, MemoryPlanError
from ...kernels_metal.kept_trials import tried_afresh
from ...kernels_metal.kernel_trial import described_lines
from ...loading.find.catalog import local_models
from ...loading.find.resolve import ALIASES
from ...loading.load import PreparedModel, meta_model
from ...loading.memory.experts import expert_demand
from ...loading.memory.images import image_memory
from ...loading.memory.kv_choice import kv_format
from ...loading.memory.plan import MemoryPlan, plan_memory
from ...loading.memory.weight_sizes import SizeChange
from ...loading.repack_cache import cache_usage, directory, limit_bytes
from ...loading.vision import vision_notes
from ...models.config_reader import check_ignored
from ...nn import residual_stream
from ...nn.small_batch_matmul import product_status
from ...util import mac
from ...util.device import (
    WIRED_GB,
    default_dtype,
    device_info,
    device_memory,
    has_metal,
    is_gpu,
    no_device_lines,
    rounds_float32,
    wired_limit,
)
from ...util.installing import install_line
from ..common.console import human_bytes

_PACKAGES = ("mlx", "mlx-metal", "mlx-lm", "transformers", "tokenizers", "huggingface-hub", "gguf", "numpy")
WIDTHS = ("16", "8", "4")
"""Bits of the cache formats that are compared."""
_BYTES_PER_WEIGHT = {"4 bits": 4.5 / 8, "8 bits": 8.5 / 8, "16 bits": 2.0}
_CACHE_SHARE = 0.15
"""Fraction of the usable memory reserved for cache and activations in the estimate of the largest model."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Findings about this machine."""

    device: str
    """Name of the processor, with GPU or CPU."""
    cpu_kernels: str
    """CPU kernels in use, or the reason for none; "" on a GPU."""
    gpu_kernels: str
    """GPU kernels in use, or the reason for none; "" on a CPU."""
    compute_dtype: str
    """Default of `--dtype` on this machine."""
    memory_bytes: int
    """Memory limit of the process."""
    memory_source: str
    """Source of that limit, such as the device or a container."""
    usable_bytes: int
    """Memory for weights, cache and activations."""
    largest_model: dict[str, int]
    """Parameters of the largest model that fits, by weight format."""
    versions: dict[str, str | None]
    """Package to version, with the platform of a wheel for macOS; None if not installed."""
    models: dict[str, str | None]
    """Model to path; None for an alias that is not installed."""
    missing: list[str]
    """Missing parts, each with the command that installs it."""
    float32: str = ""
    """Accuracy of `--dtype float32` on this machine; "" if exact."""
    gpu_products: list[str] = field(default_factory=list)
    """Implementation of small-batch products on the GPU, per tried format; empty on a CPU."""
    gpu_choices: list[str] = field(default_factory=list)
    """Choices between this project's kernels and MLX's operations on the GPU, with their measured speed; empty on a CPU."""
    packed_copies: str = ""
    """Folder and size of packed copies; "" without any."""
    replays: list[str] = field(default_factory=list)
    """Models whose replayed steps were compared with built ones on this GPU, with the results."""
    wired: str = ""
    """Wired memory, which the system never pages out; "" on a CPU."""
    matrix_units: str = ""
    """Use of the GPU's matrix units, or the reason against it; "" without an Apple GPU."""
    command_buffers: str = ""
    """Limits of MLX's command buffers that are set in the environment; "" without an Apple GPU."""
    power: str = ""
    """Power source and low power mode; "" where the system does not report them."""

    def sections(self) -> Iterator[tuple[str, list[str]]]:
        lines = [self.device, f"computes in {self.compute_dtype} unless told otherwise", self.float32, self.cpu_kernels, self.gpu_kernels]
        named = {"matrix units": self.matrix_units, "command buffers": self.command_buffers, "power": self.power}
        lines += [*self.gpu_choices, *self.gpu_products, *self.replays, *(f"{name}: {text}" for name, text in named.items() if text)]
        yield "device", [line for line in lines if line]
        sizes = ", ".join(f"{count / 1e9:.1f} B at {stored}" for stored, count in self.largest_model.items())
        yield (
            "memory",
            [
                f"{human_bytes(self.memory_bytes)} in all ({self.memory_source}), {human_bytes(self.usable_bytes)} for weights and cache",
                f"parameters that fit next to a cache: {sizes} (mlxinfer models recommend names three models)",
                *([self.wired] if self.wired else []),
                *([self.packed_copies] if self.packed_copies else []),
            ],
        )
        yield "versions", [f"{name:<16} {found or 'not installed'}" for name, found in self.versions.items()]
        yield "models", [f"{name:<16} {path or 'not here'}" for name, path in self.models.items()]
        yield "missing", self.missing or ["nothing"]


_TF32 = "products in float32 are rounded to TF32 (3 digits) by this GPU's matrix units: MLX_ENABLE_TF32=0 makes them exact, and slower"


@tried_afresh()
def diagnose() -> Diagnosis:
    memory = device_memory()
    room = memory.usable * (1 - _CACHE_SHARE)
    own: dict[str, str | None] = {
        "mlxinfer": __version__,
        "Python": platform.python_version(),
        "system": f"{_system()} {platform.machine()}",
    }
    found: dict[str, str | None] = dict.fromkeys(ALIASES) | {model.name: str(model.path) for model in local_models()}
    return Diagnosis(
        device=_device(),
        cpu_kernels="" if is_gpu() else kernels_cpu.status(),
        gpu_kernels=gpu_status(),
        gpu_choices=_choices(),
        gpu_products=product_status(default_dtype()),
        compute_dtype=str(default_dtype()).rpartition(".")[2],
        float32=_TF32 if rounds_float32() else "",
        memory_bytes=memory.total,
        memory_source=memory.source,
        usable_bytes=memory.usable,
        largest_model={stored: int(room / size) for stored, size in _BYTES_PER_WEIGHT.items()},
        versions=own | {name: _version(name) for name in _PACKAGES},
        models=found,
        missing=_missing({name for name, path in found.items() if path}),
        packed_copies=_packed_copies(),
        replays=replay_lines(replays_file()) if is_gpu() else [],
        wired=_wired(),
        matrix_units=mac.matrix_units(str(device_info().get("architecture", ""))) if has_metal() else "",
        command_buffers=_command_buffers() if has_metal() else "",
        power=_power(),
    )


def _choices() -> list[str]:
    """Try the kernels of models of usual size, and describe them."""
    residual_stream.try_usual(default_dtype())
    return [*usual_decode_lines(), *residual_stream.TRIAL.described()]


def _system() -> str:
    """Return the system's name, with the version of macOS."""
    version = ".".join(map(str, mac.macos_version()))
    return f"macOS {version}" if version else platform.system()


def _wired() -> str:
    if not is_gpu() or not wired_limit():
        return ""
    share = os.environ.get("MLX_RESIDENCY_SET_MAX_PCT")
    line = f"at most {human_bytes(wired_limit())} of it are wired: what a model needs beyond that can be paged out by a busy system"
    return f"{line} ({WIRED_GB} raises it{f'; MLX_RESIDENCY_SET_MAX_PCT={share} is set' if share else ''})"


def _command_buffers() -> str:
    operations, numbers = (os.environ.get(f"MLX_MAX_{name}_PER_BUFFER") for name in ("OPS", "MB"))
    most = f"at most {operations} operations" if operations else "MLX's own number of operations"
    return f"{most}, {numbers} million numbers (MLX_MAX_OPS_PER_BUFFER, MLX_MAX_MB_PER_BUFFER)"


def _power() -> str:
    found = mac.power()
    if found == mac.Power():
        return ""
    return f"{found}: a laptop may compute slower, and measure its kernels as slower" if found.limited else str(found)


def _packed_copies() -> str:
    if kernels_cpu.packed_version() is None:
        return ""
    limit, usage = limit_bytes(), cache_usage()
    bound = f"of at most {human_bytes(limit)}" if limit else "and no more are written"
    unfinished = f", and {human_bytes(usage.unfinished_bytes)} of unfinished ones" if usage.unfinished else ""
    size = f"{human_bytes(usage.copy_bytes)} {bound} in {directory()}{unfinished}"
    return f"packed copies of GGUF files, which start faster: {size} (MLXINFER_PACKED_GB)"


def _device() -> str:
    name = str(device_info().get("device_name") or platform.processor() or platform.machine())
    return f"{name}, {'GPU' if is_gpu() else 'CPU'}"


def _version(package: str) -> str | None:
    try:
        found = version(package)
    except PackageNotFoundError:
        return None
    tag = mac.wheel_tag(package)
    return f"{found} ({tag})" if tag.startswith("macosx") else found


def _missing(models_here: set[str]) -> list[str]:
    """Return missing parts, each with its cost or installation command."""
    lines = []
    lines += no_device_lines()
    if not lines and not has_metal() and not is_gpu():
        lines.append("no Apple GPU: models run on the CPU")
    if not is_gpu() and not kernels_cpu.available():
        lines.append(kernels_cpu.status())
    if sys.platform == "linux" and not is_gpu() and not shutil.which("g++"):
        lines.append("no C++ compiler (g++): MLX builds fused operations for the CPU with it")
    lines += [f"{name}: {alias.install_line}" for name, alias in ALIASES.items() if name not in models_here]
    modules = {"matplotlib": "pictures in notebooks", "ipykernel": "notebooks"}
    return lines + [f"{name}, for {use}: {install_line(name)}" for name, use in modules.items() if importlib.util.find_spec(name) is None]


@dataclass(frozen=True, slots=True)
class ModelDiagnosis:
    """Findings about a model, from its checkpoint's headers."""

    name: str
    """Name as typed, or the file's."""
    model_type: str
    dtype: str
    kv: str
    token_bytes: float
    """Bytes of cache per token of context; 0 if unknown."""
    layers: list[str]
    """Cache contents of each group of layers."""
    attention: list[str]
    """Attention implementation of each group of layers."""
    plan: dict[str, Any] | None = None
    """Memory plan in bytes; None if the model does not fit or its sizes are unknown."""
    problem: str = ""
    """Reason for a missing plan."""
    notes: tuple[str, ...] = ()
    context_tokens: dict[str, int] | None = None
    """Tokens of one sequence that fit in memory, by bits of the cache; the model may allow fewer."""
    sizes: list[SizeChange] = field(default_factory=list)
    """Differences between weights in memory and in the files."""
    kernels: list[str] = field(default_factory=list)
    """Kernels that were tried for this model, with their measured speed; empty on a CPU."""

    def sections(self) -> Iterator[tuple[str, list[str]]]:
        yield "model", [f"{self.name}: {self.model_type}, computes in {self.dtype}", *self.notes]
        cost = [f"{human_bytes(self.token_bytes)} for each further token of context"] if self.token_bytes else []
        yield f"cache, kv {self.kv}", [*self.layers, *cost]
        yield "attention", self.attention
        if self.kernels:
            yield "kernels", self.kernels
        yield "memory", list(self.memory_lines())
        if self.plan and self.plan["experts"]:
            from .experts import expert_lines  # few models have experts on disk

            yield "experts", list(expert_lines(self.plan["experts"]))

    def memory_lines(self) -> Iterator[str]:
        if self.plan:
            yield from _plan_lines(self.plan, self.context_tokens)
        else:
            yield self.problem
        for change in self.sizes:
            became = f"become {human_bytes(change.kept)}" if change.kept else "are not read"
            source = change.kind if change.kept else "the files"
            yield f"weights: {human_bytes(change.stored)} of {source} {became}: {change.reason}"


@tried_afresh()
def diagnose_model(
    model: str,
    kv: str,
    first16: bool,
    memory_gb: float | None = None,
    draft: str | None = None,
    ignore_config_keys: Sequence[str] = (),
    experts_memory: float | str | None = "auto",
) -> ModelDiagnosis:
    """Describe a model from the headers of its checkpoint. Raises `MLXInferError`."""
    form, _ = kv_format(kv, model, first16=first16)
    found = meta_model(model, ignore_config_keys=ignore_config_keys)
    check_ignored(ignore_config_keys, found.checkpoint.config)
    named = (found.name, found.model_type, str(found.dtype).rpartition(".")[2], form.name)
    if found.borrowed:
        return ModelDiagnosis(
            *named,
            token_bytes=0,
            layers=["all layers: mlx-lm's own cache, unquantized"],
            attention=["mlx-lm's, one sequence at a time"],
            problem="not known before it is loaded",
            notes=(*found.model.notes, *vision_notes(found.checkpoint, found.vision)),
        )
    layers, dtype = found.model.layers, found.dtype
    drafter = _drafter(draft) if draft else None

    def plan(kv: KVFormat) -> MemoryPlan | MemoryPlanError:
        try:
            seen, experts = image_memory(found.vision), expert_demand(found.expert_layers, experts_memory)
            return plan_memory(found, kv=kv, memory_gb=memory_gb, draft=drafter, images=seen, experts=experts)
        except MemoryPlanError as error:
            return error

    chosen = plan(form)
    return ModelDiagnosis(
        *named,
        token_bytes=PagedCache.token_bytes(layers, dtype, form),
        layers=layer_lines(layers, form, dtype),
        attention=attention_lines(layers, form, dtype),
        plan=None if isinstance(chosen, MemoryPlanError) else _as_object(chosen, found.checkpoint.path),
        problem=str(chosen) if isinstance(chosen, MemoryPlanError) else "",
        notes=(*found.model.notes, *vision_notes(found.checkpoint, found.vision)),
        context_tokens={bits: getattr(plan(KVFormat.parse(bits)), "room_tokens", 0) for bits in WIDTHS},
        sizes=list(found.size_changes),
        kernels=[*tried_decode_lines(), *described_lines()] if is_gpu() else [],
    )


def _drafter(draft: str) -> PreparedModel:
    found = meta_model(draft)
    if found.borrowed:
        raise DraftError(f"{found.name} keeps its own state, so it cannot draft: choose a model with a graph of its own")
    return found


def _as_object(plan: MemoryPlan, path: Path) -> dict[str, Any]:
    found = {**asdict(plan), "sequences": plan.sequences, "pool": plan.pool, "used": plan.used, "left": plan.left}
    if plan.experts:
        from .experts import experts_object  # few models have experts on disk

        found["experts"] = experts_object(plan.experts, path)
    return found | ({"images": {**found["images"], "line": plan.images.line()}} if plan.images else {})


def _plan_lines(plan: dict[str, Any], tokens: dict[str, int] | None) -> Iterator[str]:
    yield f"{human_bytes(plan['limit'])} of {human_bytes(plan['total'])} may be used ({plan['source']})"
    images = plan["images"] or {}
    parts = {
        "weights and experts in memory" if plan["experts"] else "weights": plan["weights"],
        "weights of the draft model": plan["draft_weights"],
        "weights of the vision tower": images.get("weights", 0),
        "peak of the vision tower": images.get("step", 0),
        "features of images, for reuse": images.get("features", 0),
        "peak of a step": plan["step"],
        "more while the pages grow": plan["growth"],
        f"{plan['max_num_seqs']} running sequences, {human_bytes(plan['sequence'])} each": plan["sequences"],
        f"pages of {plan['pool_tokens']} tokens, {human_bytes(plan['token'])} each": plan["pool"],
        "pages that windows have left, for reuse": plan["reuse"],
        "snapshots, for reuse": plan["snapshots"],
        "left": plan["left"],
    }
    yield from (f"{human_bytes(size):>9}  {part}" for part, size in parts.items() if size)
    if tokens:
        fits = ", ".join(f"{count} at {bits} bits" for bits, count in tokens.items())
        yield f"a context of {plan['context']} tokens; memory has room for {fits}"
    if images:
        yield images["line"]
    most = f" of at most {plan['buffer_limit']}" if plan["buffer_limit"] else ""
    yield f"{plan['buffers']} buffers{most}"
