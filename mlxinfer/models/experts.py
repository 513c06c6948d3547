"""Loads experts from the layouts of checkpoints.

The graph's layout is mlx-lm's: one matrix `[experts, out, in]` each for gate, up and down.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import mlx.core as mx

from ..nn.activations import Gate
from ..nn.linear import JoinedLinear
from ..nn.moe import ExpertLinear, Experts
from ..nn.weights import Dense, Format, Matrix, Quantized, Recipe, Weights, map_rows, stack
from .config_reader import ConfigReader

MXFP4 = Format(4, 32, "mxfp4")
PROJECTIONS = {"gate_proj": "gate_proj", "up_proj": "up_proj", "down_proj": "down_proj"}

Shape = tuple[int, int, int]


def read_expert_count(reader: ConfigReader, default: int) -> int:
    """Read `num_experts`, which transformers 5 writes as `num_local_experts`."""
    old, new = reader.optional_integer("num_experts", low=0), reader.optional_integer("num_local_experts", low=0)
    if old is not None and new is not None and old != new:
        raise reader.bad("num_local_experts", new, f"num_experts, {old}")
    return reader.count("num_local_experts" if old is None else "num_experts", default, low=0)


def read_chosen_count(reader: ConfigReader, default: int, experts: int) -> int:
    """Read `num_experts_per_tok`, at most the number of experts."""
    chosen = reader.integer("num_experts_per_tok", default)
    if chosen > experts > 0:
        raise reader.bad("num_experts_per_tok", chosen, f"at most the number of experts, {experts}")
    return chosen


def load_experts(weights: Weights, name: str, source: str, shape: Shape, gate: Gate, parts: Mapping[str, str] = PROJECTIONS) -> Experts:
    """Load experts under `name`. `shape` is (experts, inner, hidden).

    A checkpoint may also store single experts, `source.0.<part>.weight` with the names in `parts`, or gate and up in one tensor, the
    layout of transformers 5.
    """
    count, inner, hidden = shape
    shapes = {"gate_proj": (count, inner, hidden), "up_proj": (count, inner, hidden), "down_proj": (count, hidden, inner)}

    def load(part: str) -> ExpertLinear:
        single = tuple(f"{source}.{expert}.{parts[part]}.weight" for expert in range(count))
        recipes = [Recipe(single, (shapes[part][1:],) * count, stack), _in_one_tensor(source, part, shape)]
        return ExpertLinear.load_experts(weights, f"{name}.{part}", shapes[part], otherwise=recipes)

    return Experts(JoinedLinear([load("gate_proj"), load("up_proj")], [inner, inner]), load("down_proj"), gate)


def read_groups(reader: ConfigReader, experts: int, default: int = 1, default_kept: int = 1) -> tuple[int, int]:
    """Read `n_group` and `topk_group`: the number of expert groups, and of groups selected per token."""
    groups = reader.optional_integer("n_group", default) or 1
    kept = reader.optional_integer("topk_group", default_kept) or 1
    if experts % groups or kept > groups:
        raise reader.bad("n_group", groups, f"a divisor of the {experts} experts, and at least topk_group, {kept}")
    return groups, kept


def load_bias(weights: Weights, name: str, count: int, *others: str) -> mx.array:
    """Load the selection bias of `count` experts; `others` are alternative names."""
    recipes = [
        Recipe((other,), (shape,), lambda s: map_rows(s[0], lambda a: a.reshape(-1)))
        for other in others
        for shape in ((count,), (1, count))
    ]
    return weights.vector(name, (count,), otherwise=recipes, dtype=mx.float32)


def _in_one_tensor(source: str, part: str, shape: Shape) -> Recipe:
    count, inner, hidden = shape
    if part == "down_proj":
        return Recipe((f"{source}.down_proj",), ((count, hidden, inner),), lambda sources: sources[0])
    rows = slice(0, inner) if part == "gate_proj" else slice(inner, None)
    return Recipe((f"{source}.gate_up_proj",), ((count, 2 * inner, hidden),), lambda sources: map_rows(sources[0], lambda a: a[:, rows]))


def load_interleaved_experts(weights: Weights, name: str, shape: Shape, gate: Gate) -> Experts:
    """Load gpt-oss's experts: gate and up are alternating rows of one tensor, transposed or packed as MXFP4, with biases."""
    count, inner, hidden = shape

    def gate_or_up(part: str, first: int) -> ExpertLinear:
        bias = Recipe((f"{name}.gate_up_proj_bias",), ((count, 2 * inner),), lambda s: map_rows(s[0], lambda a: a[:, first::2]))
        recipes = _stored(f"{name}.gate_up_proj", (count, 2 * inner, hidden), lambda a: a[:, first::2])
        return ExpertLinear.load_experts(weights, f"{name}.{part}", (count, inner, hidden), bias=[bias], otherwise=recipes)

    bias = Recipe((f"{name}.down_proj_bias",), ((count, hidden),), lambda sources: sources[0])
    recipes = _stored(f"{name}.down_proj", (count, hidden, inner), lambda a: a)
    down = ExpertLinear.load_experts(weights, f"{name}.down_proj", (count, hidden, inner), bias=[bias], otherwise=recipes)
    return Experts(JoinedLinear([gate_or_up("gate_proj", 0), gate_or_up("up_proj", 1)], [inner, inner]), down, gate)


def _stored(name: str, shape: Shape, pick: Callable[[mx.array], mx.array]) -> list[Recipe]:
    """Return recipes for both forms in which gpt-oss stores a tensor of `shape`; `pick` selects its rows."""
    count, out_dims, in_dims = shape

    def unpack(sources: list[Matrix]) -> Matrix:
        blocks, scales = (_unpacked_values(source) for source in sources)
        return Quantized(pick(blocks.view(mx.uint32).flatten(-2)), pick(scales), None, MXFP4)

    def transpose(sources: list[Matrix]) -> Matrix:
        return Dense(pick(_unpacked_values(sources[0]).swapaxes(1, 2)))

    packed = (count, out_dims, in_dims // 32, 16), (count, out_dims, in_dims // 32)
    return [
        Recipe((f"{name}_blocks", f"{name}_scales"), packed, unpack),
        Recipe((name,), ((count, in_dims, out_dims),), transpose),
    ]


def _unpacked_values(matrix: Matrix) -> mx.array:
    if not isinstance(matrix, Dense):
        raise ValueError("it is quantized already")
    return matrix.weight
