"""Chooses a format per matrix: least loss for a size, or least size for a loss."""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ... import kernels_cpu
from ...errors import ConversionError
from ...loading.checkpoint import Checkpoint
from ...loading.load import open_checkpoint
from ...loading.weights import Progress, can_quantize
from ...nn.weights import Format, numbers
from ..calibrate.texts import Texts, texts_to_read
from ..encode.affine import fit
from ..encode.gptq import Factor, matmul, to_numpy
from ..report import Report
from ..write.journal import Journal
from ..write.reader import blocks
from .head_cost import rounded
from .quantization_plan import NAME, QuantizationPlan, is_planned, read_plan
from .sensitivity import Sensitivities, Sensitivity, sensitivities
from .weight_map import ConversionPlan, OutputTensor

FORMATS = tuple(
    Format(bits, group)
    for bits, groups in ((2, (64, 32)), (3, (128, 64, 32)), (4, (128, 64, 32)), (5, (128, 64, 32)), (6, (128, 64)), (8, (64,)))
    for group in groups
)
"""Formats to choose from."""
_FED_BACK = 0.76
"""GPTQ's cost in layers relative to the fit's: measured 0.765 for SmolLM2 and 0.72 for Gemma 3 270M.

The few tokens of a plan cannot show it for each matrix: wide matrices would fit these tokens.
"""
SAMPLED = 512
"""Rows of a matrix whose error is computed."""


@dataclass(frozen=True, slots=True)
class FormatChoice:
    """A format for the matrices of an item."""

    form: Format
    nbytes: int
    """Size of the matrices in it, scales included."""
    cost: float
    """KL divergence that it causes, in nats."""


@dataclass(frozen=True, slots=True)
class Item:
    """Matrices that share a format because they are joined at load."""

    outputs: tuple[OutputTensor, ...]
    choices: tuple[FormatChoice, ...]
    """Smallest first; each adds less benefit per byte than the one before (a convex hull)."""


def make_plan(planned: ConversionPlan, items: Sequence[Item], *, bpw: float | None, target_kl: float | None) -> QuantizationPlan:
    """Return the plan with the least cost within `bpw` bits per weight of everything written, or the smallest within `target_kl`.

    Raises `ConversionError` if there is none.
    """
    parameters = sum(math.prod(output.request.shape) for output in planned.outputs)
    fixed = planned.nbytes - sum(_nbytes(item.outputs, None) for item in items)
    budget = math.inf if bpw is None else bpw * parameters / 8 - fixed
    taken = [0] * len(items)
    size, cost = sum(item.choices[0].nbytes for item in items), sum(item.choices[0].cost for item in items)
    if size > budget:
        raise ConversionError(f"{bpw} bits per weight cannot be reached: the least is {(size + fixed) * 8 / parameters:.3f}")
    steps = [(-_gain(item, 0), number) for number, item in enumerate(items) if len(item.choices) > 1]
    heapq.heapify(steps)
    while steps and (target_kl is None or cost > target_kl):
        _, number = heapq.heappop(steps)
        before, after = items[number].choices[taken[number] : taken[number] + 2]
        if size + after.nbytes - before.nbytes > budget:
            continue  # something smaller may still fit
        size, cost = size + after.nbytes - before.nbytes, cost + after.cost - before.cost
        taken[number] += 1
        if taken[number] + 1 < len(items[number].choices):
            heapq.heappush(steps, (-_gain(items[number], taken[number]), number))
    if target_kl is not None and cost > target_kl:
        raise ConversionError(f"a KL divergence of {target_kl} cannot be reached with 8 bits at most: the least is about {cost:.2g}")
    formats = {o.name: item.choices[at].form for item, at in zip(items, taken, strict=True) for o in item.outputs}
    return QuantizationPlan(formats, (size + fixed) * 8 / parameters, cost)


def _gain(item: Item, at: int) -> float:
    """Return the cost that the next choice saves, per byte."""
    before, after = item.choices[at : at + 2]
    return (before.cost - after.cost) / (after.nbytes - before.nbytes)


def items_of(checkpoint: Checkpoint, planned: ConversionPlan, found: Sensitivities, *, feedback: bool = False) -> list[Item]:
    """Return the items to decide, with the cost of each choice: by the weighted fit, or with `feedback` by GPTQ."""
    outputs = {output.request.name: output for output in planned.outputs if is_planned(output)}
    blocks_of_items: list[list[Item]] = []
    for places in found.places():  # the last block comes first
        blocks_of_items.append([])
        for place in places:
            members = [outputs.pop(name) for sensitivity in place for name in sensitivity.names if name in outputs]
            if members:
                forms = _forms(members)
                together = np.sum([rounding_costs(checkpoint, sensitivity, members, forms) for sensitivity in place], axis=0)
                blocks_of_items[-1].append(_hull_item(members, forms, (together * (_FED_BACK if feedback else 1)).tolist()))
    items = [item for block in reversed(blocks_of_items) for item in block]
    if found.final.name in outputs:
        items.append(_head_item(checkpoint, outputs.pop(found.final.name), found, feedback))
    for output in list(outputs.values()):
        if output.name.endswith(("embed_tokens.weight", "embeddings.weight")):
            del outputs[output.request.name]
            forms = _forms([output])
            alike = mx.ones((output.request.shape[-1],))
            items.append(_hull_item([output], forms, _embedding_costs(checkpoint, output, found, forms, alike)))
    return items


def _head_item(checkpoint: Checkpoint, output: OutputTensor, found: Sensitivities, feedback: bool) -> Item:
    """Return the item of the head, which may also be the embedding.

    The gain of GPTQ is measured in 4 bits and applied to other formats, because GPTQ takes ten times as long as the fit.
    """
    forms, final = _forms([output]), found.final
    factors = [None, final.factor()] if feedback else [None]
    at = min(range(len(forms)), key=lambda n: (abs(forms[n].bits - 4), abs(forms[n].group_size - 64)))

    def costs(of: Callable[[list[Format], Factor | None], list[float]]) -> np.ndarray:
        by_fit = of(forms, None)
        gains = [of([forms[at]], factor)[0] / max(by_fit[at], 1e-30) for factor in factors[1:]]
        return np.array(by_fit) * (gains[0] if gains else 1.0)

    total = costs(lambda some, factor: final.costs(some, output.dtype, factor))
    if final.tied:
        total = total + costs(lambda some, factor: _embedding_costs(checkpoint, output, found, some, final.importance, factor))
    return _hull_item([output], forms, total.tolist())


def _forms(members: Sequence[OutputTensor]) -> list[Format]:
    return [form for form in FORMATS if all(can_quantize(output.request.shape, form) for output in members)]


def _hull_item(members: Sequence[OutputTensor], forms: Sequence[Format], costs: Sequence[float]) -> Item:
    choices = [FormatChoice(form, _nbytes(members, form), cost) for form, cost in zip(forms, costs, strict=True)]
    return Item(tuple(members), hull(choices))


def _nbytes(members: Sequence[OutputTensor], form: Format | None) -> int:
    targets = [output if form is None else replace(output, target=form) for output in members]
    return sum(part.nbytes for output in targets for part in output.parts())


def hull(choices: Sequence[FormatChoice]) -> tuple[FormatChoice, ...]:
    """Return the choices that are best for some price of a byte, smallest first."""
    kept: list[FormatChoice] = []
    for choice in sorted(choices, key=lambda each: (each.nbytes, each.cost)):
        if kept and choice.cost >= kept[-1].cost:
            continue
        while len(kept) > 1 and _slope(kept[-2], choice) >= _slope(kept[-2], kept[-1]):
            kept.pop()
        kept.append(choice)
    return tuple(kept)


def _slope(before: FormatChoice, after: FormatChoice) -> float:
    return (before.cost - after.cost) / max(after.nbytes - before.nbytes, 1)


def rounding_costs(
    checkpoint: Checkpoint, sensitivity: Sensitivity, members: Sequence[OutputTensor], forms: Sequence[Format]
) -> np.ndarray:
    """Return the cost of rounding these tensors to each format by the weighted fit: half of `sum over rows r of w_r E_r C E_r^T`."""
    total, first = np.zeros(len(forms)), 0
    by_name = {output.request.name: output for output in members}
    for name in sensitivity.names:
        output = by_name.get(name)
        rows = output.request.shape[-2] if output else checkpoint.shape(name)[-2]
        weights = sensitivity.rows[first : first + rows]
        first += rows
        if output is None:
            continue
        for weight, picked, share in _samples(checkpoint, output):
            plain = weight.astype(output.dtype)
            for number, form in enumerate(forms):
                error = to_numpy(fit(plain, form, sensitivity.importance).dequantize(mx.float32)) - to_numpy(plain)
                costs = (matmul(error, sensitivity.curvature) * error).sum(-1)
                total[number] += float((weights[picked] * costs).sum()) * share / 2
    return total


def _samples(checkpoint: Checkpoint, output: OutputTensor) -> list[tuple[mx.array, np.ndarray, float]]:
    """Return some rows of a matrix or of all experts, their numbers within one expert, and the rows that each represents, divided by the
    experts."""
    rows, experts = output.request.shape[-2], math.prod(output.request.shape[:-2])
    step = max(rows * experts // SAMPLED, 1)
    step += step > 1 and rows % step == 0  # different rows of each expert
    found, first = [], 0
    for block in blocks(checkpoint, output.request):
        count = block.shape[0]
        picked = np.arange(-first % step, count, step)
        if picked.size:
            found.append((numbers(block)[mx.array(picked)], (first + picked) % rows, step / experts))
            mx.eval(found[-1][0])
        first += count
    return found


def _embedding_costs(
    checkpoint: Checkpoint,
    output: OutputTensor,
    found: Sensitivities,
    forms: Sequence[Format],
    importance: mx.array,
    factor: Factor | None = None,
) -> list[float]:
    """Return the cost of rounding the embedding as an input: half the mean of the rows' squared gradients times squared errors."""
    ids, counts = np.unique(np.array(found.tokens), return_counts=True)
    costs, first = np.zeros(len(forms)), 0
    for block in blocks(checkpoint, output.request):
        here = (ids >= first) & (ids < first + block.shape[0])
        if here.any():
            plain = numbers(block)[mx.array(ids[here] - first)].astype(output.dtype)
            for number, form in enumerate(forms):
                error = rounded(plain, form, importance, factor) - to_numpy(plain)
                costs[number] += float(counts[here] @ (np.square(error) @ found.embedding)) / 2
        first += block.shape[0]
    return [float(cost) for cost in costs / len(found.tokens)]


TOKENS = 4096
"""Tokens read to measure costs. Few numbers are wanted, so few tokens suffice."""


@dataclass(slots=True)
class QuantizationBudget:
    """A size, a loss or a plan, given instead of bits."""

    bpw: float | None
    """Bits per weight of everything written."""
    target_kl: float | None
    """Largest KL divergence, in nats."""
    plan: QuantizationPlan | None
    """The given plan, or the one made by `decide`."""
    replayed: bool = field(default=False)
    """True if the plan was given."""

    @classmethod
    def of(cls, bpw: float | None, target_kl: float | None, plan: str | Path | None) -> QuantizationBudget | None:
        """Return the budget, None if nothing is given. Raises `ConversionError` for plans that cannot be read."""
        if bpw is None and target_kl is None and plan is None:
            return None
        return cls(bpw, target_kl, None if plan is None else read_plan(plan), plan is not None)

    def key(self) -> dict[str, Any]:
        """Return everything that the result depends on."""
        return {"bpw": self.bpw, "target_kl": self.target_kl, "plan": self.plan.to_json() if self.plan and self.replayed else None}

    def replay(self, planned: ConversionPlan) -> ConversionPlan:
        """Return the conversion in the formats of a given plan, otherwise unchanged. Raises `ConversionError` if they do not fit."""
        return self.plan.apply(planned) if self.plan else planned

    def decide(
        self,
        checkpoint: Checkpoint,
        planned: ConversionPlan,
        texts: Texts,
        journal: Journal,
        progress: Progress | None,
        *,
        gptq: bool = False,
    ) -> ConversionPlan:
        """Return the conversion in formats that meet the budget. With `gptq`, more texts will be needed afterwards.

        Raises `ConversionError` if the budget cannot be met, `MLXInferError`.
        """
        if self.replayed:
            return planned
        read = texts_to_read(checkpoint, texts, journal, None if gptq else TOKENS)
        items = self._items(checkpoint, planned, read, journal, progress, gptq=gptq)
        self.plan = make_plan(planned, items, bpw=self.bpw, target_kl=self.target_kl)
        return self.plan.apply(planned)

    def write(self, folder: Path) -> None:
        """Write the plan as a file in this folder."""
        assert self.plan is not None
        (folder / NAME).write_text(self.plan.to_json(), encoding="utf-8")

    def notes(self, report: Report) -> list[str]:
        """Return notes on the expected and the measured loss."""
        assert self.plan is not None
        notes = [f"formats (bits/group): {self.plan.summary()}, in {NAME}"]
        if not math.isnan(self.plan.kl):
            measured = f"; measured {report.quality.kl:.4f}" if report.quality else ""
            notes.append(f"expected KL {self.plan.kl:.4f}, on the model's own samples{measured}")
            if self.target_kl is not None and report.quality and report.quality.kl > self.target_kl:
                notes.append(f"the measured KL is above the target of {self.target_kl:g}: ask for less, or for --encoder gptq")
        return notes

    def _items(
        self,
        checkpoint: Checkpoint,
        planned: ConversionPlan,
        texts: Sequence[Sequence[int]],
        journal: Journal,
        progress: Progress | None,
        *,
        gptq: bool,
    ) -> list[Item]:
        outputs = {output.name: output for output in planned.outputs}
        kept = journal.done("costs")
        if kept is None:
            read: list[Sequence[int]] = []
            used = 0
            for text in texts:
                if used + len(text) <= TOKENS or not read:
                    read.append(text)
                    used += len(text)
            forward = open_checkpoint(checkpoint.path, raw_blocks=kernels_cpu.in_use())
            try:
                found = sensitivities(checkpoint, forward, read, progress)
            finally:
                forward.close()
            kept = {"items": [_item_entry(item) for item in items_of(checkpoint, planned, found, feedback=gptq)]}
            journal.record("costs", json.loads(json.dumps(kept)))
        return [Item(tuple(outputs[name] for name in names), tuple(map(_choice, choices))) for names, choices in kept["items"]]


def _choice(entry: list[Any]) -> FormatChoice:
    bits, group_size, nbytes, cost = entry
    return FormatChoice(Format(bits, group_size), nbytes, cost)


def _item_entry(item: Item) -> list[Any]:
    choices = [[each.form.bits, each.form.group_size, each.nbytes, each.cost] for each in item.choices]
    return [[output.name for output in item.outputs], choices]
