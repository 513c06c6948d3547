"""Which matrix gets which format, so that a model of a given size loses least, or one that loses so much is smallest."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from ...errors import ConversionError
from ...loading.checkpoint import Checkpoint
from ...loading.weights import can_quantize
from ...nn.weights import Format, numbers
from ..calibrate.products import matmul, to_numpy
from ..encode.affine import fit
from ..encode.gptq import Factor
from ..write.reader import blocks
from .head_cost import rounded
from .quantization_plan import QuantizationPlan, is_planned
from .sensitivity import Sensitivities, Sensitivity
from .weight_map import ConversionPlan, Output

FORMATS = tuple(
    Format(bits, group)
    for bits, groups in ((2, (64, 32)), (3, (128, 64, 32)), (4, (128, 64, 32)), (5, (128, 64, 32)), (6, (128, 64)), (8, (64,)))
    for group in groups
)
"""What a plan chooses from."""
_FED_BACK = 0.76
"""What GPTQ leaves of the fit's cost in layers: measured, 0.765 for SmolLM2, 0.72 for Gemma 3 270M. On the few tokens that are read for a
plan it could not be told for each matrix: wide ones would remember them."""
SAMPLED = 512
"""Rows of a matrix for which the error is computed."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A format for the matrices of an item."""

    form: Format
    """The format."""
    nbytes: int
    """What they take in it, scales included."""
    cost: float
    """The KL divergence that it causes, in nats."""


@dataclass(frozen=True, slots=True)
class Item:
    """Matrices that have one format, because they are joined when the model is loaded."""

    outputs: tuple[Output, ...]
    """The matrices."""
    choices: tuple[Choice, ...]
    """From the smallest on, each better than the one before it per byte that it adds: a convex hull."""


def make_plan(planned: ConversionPlan, items: Sequence[Item], *, bpw: float | None, target_kl: float | None) -> QuantizationPlan:
    """The plan that costs least within `bpw` bits per weight of all that is written, or the smallest that costs no more than `target_kl`.
    Raises `ConversionError` where there is none."""
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
    """What the next choice saves, per byte."""
    before, after = item.choices[at : at + 2]
    return (before.cost - after.cost) / (after.nbytes - before.nbytes)


def items_of(checkpoint: Checkpoint, planned: ConversionPlan, found: Sensitivities, *, feedback: bool = False) -> list[Item]:
    """What is to be decided, with the cost of every choice: by the weighted fit, or with `feedback` by GPTQ."""
    outputs = {output.request.name: output for output in planned.outputs if is_planned(output)}
    blocks_of_items: list[list[Item]] = []
    for places in found.places():  # the last block comes first
        blocks_of_items.append([])
        for place in places:
            members = [outputs.pop(name) for sensitivity in place for name in sensitivity.names if name in outputs]
            if members:
                forms = _forms(members)
                together = np.sum([_costs(checkpoint, sensitivity, members, forms) for sensitivity in place], axis=0)
                blocks_of_items[-1].append(_item(members, forms, (together * (_FED_BACK if feedback else 1)).tolist()))
    items = [item for block in reversed(blocks_of_items) for item in block]
    if found.final.name in outputs:
        items.append(_head(checkpoint, outputs.pop(found.final.name), found, feedback))
    for output in list(outputs.values()):
        if output.name.endswith(("embed_tokens.weight", "embeddings.weight")):
            del outputs[output.request.name]
            forms = _forms([output])
            alike = mx.ones((output.request.shape[-1],))
            items.append(_item([output], forms, _embedding_costs(checkpoint, output, found, forms, alike)))
    return items


def _head(checkpoint: Checkpoint, output: Output, found: Sensitivities, feedback: bool) -> Item:
    """The head, also where it is the embedding at the same time. What GPTQ changes is measured in 4 bits, and holds for other formats as
    well: it is tenfold dearer than the fit."""
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
    return _item([output], forms, total.tolist())


def _forms(members: Sequence[Output]) -> list[Format]:
    return [form for form in FORMATS if all(can_quantize(output.request.shape, form) for output in members)]


def _item(members: Sequence[Output], forms: Sequence[Format], costs: Sequence[float]) -> Item:
    choices = [Choice(form, _nbytes(members, form), cost) for form, cost in zip(forms, costs, strict=True)]
    return Item(tuple(members), hull(choices))


def _nbytes(members: Sequence[Output], form: Format | None) -> int:
    targets = [output if form is None else replace(output, target=form) for output in members]
    return sum(part.nbytes for output in targets for part in output.parts())


def hull(choices: Sequence[Choice]) -> tuple[Choice, ...]:
    """Those that are best for some price of a byte, from the smallest on."""
    kept: list[Choice] = []
    for choice in sorted(choices, key=lambda each: (each.nbytes, each.cost)):
        if kept and choice.cost >= kept[-1].cost:
            continue
        while len(kept) > 1 and _slope(kept[-2], choice) >= _slope(kept[-2], kept[-1]):
            kept.pop()
        kept.append(choice)
    return tuple(kept)


def _slope(before: Choice, after: Choice) -> float:
    return (before.cost - after.cost) / max(after.nbytes - before.nbytes, 1)


def _costs(checkpoint: Checkpoint, sensitivity: Sensitivity, members: Sequence[Output], forms: Sequence[Format]) -> np.ndarray:
    """The cost of rounding these tensors to each format by the weighted fit: half of `sum over rows r of w_r E_r C E_r^T`."""
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


def _samples(checkpoint: Checkpoint, output: Output) -> list[tuple[mx.array, np.ndarray, float]]:
    """Some rows of a matrix, or of all experts; their numbers in the matrix of one, and for how many rows each stands, over the experts."""
    rows, experts = output.request.shape[-2], math.prod(output.request.shape[:-2])
    step = max(rows * experts // SAMPLED, 1)
    step += step > 1 and rows % step == 0  # not the same rows of every expert
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
    output: Output,
    found: Sensitivities,
    forms: Sequence[Format],
    importance: mx.array,
    factor: Factor | None = None,
) -> list[float]:
    """The cost of rounding the embedding as far as it is an input: half the mean of the rows' squared gradients times squared errors."""
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
