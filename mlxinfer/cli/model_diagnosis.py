"""The findings behind `mlxinfer doctor MODEL`: what its layers keep, and what the memory is used for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, cast

from ..cache.backend import attention_lines
from ..cache.format import KVFormat
from ..cache.paged import PagedCache
from ..cache.report import layer_lines
from ..engine.plan import MemoryPlan, Planned, plan_memory
from ..errors import DraftError, MemoryPlanError
from ..loading.outline import Outline, outline
from .text import human_bytes

_WIDTHS = ("16", "8", "4")


@dataclass(frozen=True, slots=True)
class ModelDiagnosis:
    name: str
    model_type: str
    dtype: str
    kv: str
    token_bytes: float
    """Of cache, for each further token of context; 0 where it is not known."""
    layers: list[str]
    attention: list[str]
    plan: dict[str, Any] | None = None
    """A `MemoryPlan`, in bytes; None where the model does not fit, or nothing is known of its sizes."""
    problem: str = ""
    """Why there is no plan."""
    context_tokens: dict[str, int] | None = None
    """Tokens that fit, of one sequence, by the bits of the cache, whatever the model allows."""

    def sections(self) -> Iterator[tuple[str, list[str]]]:
        yield "model", [f"{self.name}: {self.model_type}, computes in {self.dtype}"]
        cost = [f"{human_bytes(self.token_bytes)} for each further token of context"] if self.token_bytes else []
        yield f"cache, kv {self.kv}", [*self.layers, *cost]
        yield "attention", self.attention
        yield "memory", list(_memory_lines(self.plan, self.context_tokens)) if self.plan else [self.problem]


def diagnose_model(model: str, kv: str, first16: bool, memory_gb: float | None = None, draft: str | None = None) -> ModelDiagnosis:
    """From the headers of its checkpoint. Raises `MLXInferError`."""
    form = KVFormat.parse(kv, first16=first16)
    found = outline(model)
    name = str(found.dtype).rpartition(".")[2]
    if found.model is None:
        lines = ["all layers: mlx-lm's own cache, unquantized"]
        ways = ["mlx-lm's, one sequence at a time"]
        return ModelDiagnosis(found.name, found.model_type, name, form.name, 0, lines, ways, problem="not known before it is loaded")
    layers, dtype = found.model.layers, found.dtype
    drafter = _drafter(draft) if draft else None
    plan, problem = _plan(found, form, memory_gb, drafter)
    return ModelDiagnosis(
        name=found.name,
        model_type=found.model_type,
        dtype=name,
        kv=form.name,
        token_bytes=PagedCache.token_bytes(layers, dtype, form),
        layers=layer_lines(layers, form, dtype),
        attention=attention_lines(layers, form, dtype),
        plan=_as_object(plan) if plan else None,
        problem=problem,
        context_tokens={bits: _room(found, KVFormat.parse(bits), memory_gb, drafter) for bits in _WIDTHS},
    )


def _drafter(draft: str) -> Outline:
    found = outline(draft)
    if found.model is None:
        raise DraftError(f"{found.name} keeps its own state, so it cannot draft: choose a model with a graph of its own")
    return found


def _plan(found: Outline, kv: KVFormat, memory_gb: float | None, draft: Outline | None) -> tuple[MemoryPlan | None, str]:
    model, drafter = cast(Planned, found), cast("Planned | None", draft)  # both have a graph
    try:
        return plan_memory(model, kv=kv, memory_gb=memory_gb, draft=drafter), ""
    except MemoryPlanError as error:
        return None, str(error)


def _room(found: Outline, kv: KVFormat, memory_gb: float | None, draft: Outline | None) -> int:
    plan, _ = _plan(found, kv, memory_gb, draft)
    return plan.room_tokens if plan else 0


def _as_object(plan: MemoryPlan) -> dict[str, Any]:
    return {**asdict(plan), "sequences": plan.sequences, "pool": plan.pool, "used": plan.used, "left": plan.left}


def _memory_lines(plan: dict[str, Any], tokens: dict[str, int] | None) -> Iterator[str]:
    yield f"{human_bytes(plan['limit'])} of {human_bytes(plan['total'])} may be used ({plan['source']})"
    parts = {
        "weights": plan["weights"],
        "weights of the draft model": plan["draft_weights"],
        "peak of a step": plan["step"],
        f"{plan['max_sequences']} running sequences, {human_bytes(plan['sequence'])} each": plan["sequences"],
        f"pages of {plan['pool_tokens']} tokens, {human_bytes(plan['token'])} each": plan["pool"],
        "pages that windows have left, for reuse": plan["reuse"],
        "snapshots, for reuse": plan["snapshots"],
        "left": plan["left"],
    }
    yield from (f"{human_bytes(size):>9}  {part}" for part, size in parts.items() if size)
    if tokens:
        fits = ", ".join(f"{count} at {bits} bits" for bits, count in tokens.items())
        yield f"a context of {plan['context']} tokens; memory has room for {fits}"
    most = f" of at most {plan['buffer_limit']}" if plan["buffer_limit"] else ""
    yield f"{plan['buffers']} buffers{most}"
