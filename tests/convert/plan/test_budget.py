"""Plans of formats: their costs, sizes and files."""

from __future__ import annotations

import json
import math
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.models.checkpoints import config_of, random_checkpoint
from support.models.destroyed import destroyed
from support.models.families import GOLDEN, NAMES

from mlxinfer import LLM
from mlxinfer.convert import convert
from mlxinfer.convert.calibrate.blockwise import load_part
from mlxinfer.convert.calibrate.differentiable_step import DifferentiableStep
from mlxinfer.convert.calibrate.texts import Calibration
from mlxinfer.convert.plan import sensitivity
from mlxinfer.convert.plan.budget import FORMATS, FormatChoice, Item, hull, items_of, make_plan
from mlxinfer.convert.plan.quantization_plan import NAME, QuantizationPlan, read_plan
from mlxinfer.convert.plan.sensitivity import make_differentiable, sensitivities
from mlxinfer.convert.plan.weight_map import plan
from mlxinfer.errors import ConversionError
from mlxinfer.loading.directory import SafetensorsCheckpoint
from mlxinfer.loading.load import open_checkpoint
from mlxinfer.models import architecture
from mlxinfer.nn.weights import Format

TEXTS = tuple(tuple(row) for row in np.random.default_rng(0).integers(3, 96, (6, 40)).tolist())
SETTINGS = {"calibration": Calibration(TEXTS, "some"), "measure": False}


def source_of(tmp_path: Path, name: str = "llama", **changes: object) -> Path:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32}
    sizes = sizes if name in ("llama", "qwen3") else {}
    return random_checkpoint(tmp_path / "source", config_of(name, **{**sizes, **changes}))


def kl(source: Path, other: Path) -> float:
    ids = [list(text) for text in TEXTS]
    exact, found = LLM(source, dtype="float32"), LLM(other, dtype="float32")
    total = []
    for text in ids:
        p, q = (x - mx.logsumexp(x, axis=-1, keepdims=True) for x in (exact.logits(text), found.logits(text)))
        total.append(np.array((mx.exp(p) * (p - q)).sum(-1)))
    return float(np.concatenate(total).mean())


NOT_PLANNED = "gemma4_text_shared"
"""Its blocks get more than the residual stream."""


@pytest.mark.parametrize(("name", "number"), [(name, number) for name in NAMES if name != NOT_PLANNED for number in (1, 2)])
def test_gradients_are_those_of_differences(name: str, number: int) -> None:
    """Differentiates a block along three directions. Between the ends of one, a token may choose other experts."""
    checkpoint = open_checkpoint(GOLDEN / name)
    graph, rng = architecture(checkpoint.config), np.random.default_rng(1)
    block, loaded = load_part(checkpoint, min(number, graph.sizes.layers))
    make_differentiable(block, loaded)
    step, little, errors = DifferentiableStep(graph.specs, [7, 5]), 2e-3, []
    rotations = {key: rope.at(step) for key, rope in graph.ropes.items()}
    for _ in range(3):
        x, along, weights = (mx.array(rng.standard_normal((12, graph.sizes.hidden)).astype(np.float32)) for _ in range(3))
        _, (gradient,) = mx.vjp(lambda x: block(x, step, rotations), [x], [weights])
        ends = [np.array(block(x + sign * little * along, step, rotations), np.float64) for sign in (1, -1)]
        slope = ((ends[0] - ends[1]) * np.array(weights)).sum() / (2 * little)
        errors.append(abs(float(mx.sum(gradient * along).item()) - slope) / max(abs(slope), 1))
    assert sorted(errors)[1] < 0.02


@pytest.mark.long
@pytest.mark.parametrize("name", ["cohere2", "falcon_h1", "nemotron_h", "gemma4_text"])
def test_blocks_of_every_kind_are_planned_for(tmp_path: Path, name: str) -> None:
    source = source_of(tmp_path, name)
    report = convert(source, tmp_path / "out", bpw=6, **SETTINGS)
    assert report.bits_per_weight <= 6
    assert kl(source, tmp_path / "out") < kl(source, destroyed(source, tmp_path / "destroyed")) / 3


def test_a_family_that_cannot_be_planned_for_is_refused_before_texts_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sensitivity, "read_through", None)
    with pytest.raises(ConversionError, match="a budget of bits cannot be planned for gemma4_text: give --bits, or"):
        sensitivities(*[open_checkpoint(GOLDEN / NOT_PLANNED)] * 2, TEXTS)


@pytest.mark.long
def test_what_is_expected_is_what_comes_out(tmp_path: Path) -> None:
    """Costs are second-order estimates, so a factor of two is allowed."""
    source = source_of(tmp_path)
    checkpoint = open_checkpoint(source)
    planned = plan(checkpoint, Format(4, 64), True, None)
    items = items_of(checkpoint, planned, sensitivities(checkpoint, checkpoint, TEXTS))
    assert {output.name for item in items for output in item.outputs} == {o.name for o in planned.outputs if isinstance(o.target, Format)}
    found = make_plan(planned, items, bpw=None, target_kl=0.1)
    (tmp_path / "plan.json").write_text(found.to_json())
    convert(source, tmp_path / "out", plan=tmp_path / "plan.json", measure=False)
    assert 0.5 < kl(source, tmp_path / "out") / found.kl < 2


@pytest.mark.long
def test_the_budget_is_kept_and_pays(tmp_path: Path) -> None:
    source = source_of(tmp_path, num_hidden_layers=4)
    report = convert(source, tmp_path / "plan", bpw=4.6, **SETTINGS)
    stored = SafetensorsCheckpoint(tmp_path / "plan")
    assert sum(map(stored.nbytes, stored.names())) * 8 / report.parameters == pytest.approx(report.bits_per_weight)
    assert 4.6 * 0.97 <= report.bits_per_weight <= 4.6
    assert any("expected KL" in note for note in report.notes)
    found = read_plan(tmp_path / "plan" / NAME)
    assert found.bpw == pytest.approx(report.bits_per_weight, abs=1e-5)
    again = convert(source, tmp_path / "again", plan=tmp_path / "plan" / NAME, **SETTINGS)
    assert again.nbytes == report.nbytes
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (tmp_path / "plan" / "model.safetensors").read_bytes()


@pytest.mark.long
def test_what_is_joined_has_one_format(tmp_path: Path) -> None:
    convert(source_of(tmp_path, "qwen3", num_hidden_layers=3), tmp_path / "out", bpw=4.5, **SETTINGS)
    formats = read_plan(tmp_path / "out" / NAME).formats
    for layer in range(3):
        base = f"model.layers.{layer}"
        assert len({formats[f"{base}.self_attn.{part}_proj.weight"] for part in "qkv"}) == 1
        assert len({formats[f"{base}.mlp.{part}_proj.weight"] for part in ("gate", "up")}) == 1


@pytest.mark.slow
def test_a_target_is_reached_with_less_the_more_it_allows(tmp_path: Path) -> None:
    source = source_of(tmp_path)
    sizes = []
    for target in (0.3, 0.03, 0.003):
        report = convert(source, tmp_path / str(target), target_kl=target, **SETTINGS)
        assert read_plan(tmp_path / str(target) / NAME).kl <= target
        sizes.append(report.nbytes)
    assert sizes[0] < sizes[1] < sizes[2]
    with pytest.raises(ConversionError, match="cannot be reached with 8 bits"):
        convert(source, tmp_path / "none", target_kl=1e-9, **SETTINGS)
    with pytest.raises(ConversionError, match=r"2.1 bits per weight cannot be reached: the least is [23]\."):
        convert(source, tmp_path / "none", bpw=2.1, **SETTINGS)


@pytest.mark.slow
def test_experts_and_gptq_can_be_planned_for(tmp_path: Path) -> None:
    source = source_of(tmp_path, "qwen3_moe")
    report = convert(source, tmp_path / "out", bpw=16, encoder="gptq", **SETTINGS)
    assert report.bits_per_weight <= 16
    assert any("experts" in name or "switch" in name for name in read_plan(tmp_path / "out" / NAME).formats)


PLAN = {"model.layers.0.mlp.up_proj": {"bits": 4, "group_size": 64}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model.layers.9.mlp.up_proj": {"bits": 4, "group_size": 64}},
            r"names model\.layers\.9\.mlp\.up_proj\.weight, which the model does",
        ),
        ({"model.layers.1.mlp.down_proj": None}, r"says nothing about model\.layers\.1\.mlp\.down_proj\.weight: add bits"),
        ({"model.layers.1.mlp.down_proj": {"bits": 7, "group_size": 64}}, r"down_proj a format that there is not: .* not 7"),
        ({"model.layers.1.mlp.down_proj": {"bits": 4}}, r'down_proj \{"bits": 4\}, not'),
        ({"model.layers.1.mlp.down_proj": {"bits": 4, "group_size": 64, "mode": "mxfp4"}}, "down_proj .* or false"),
        ({"model.layers.1.self_attn.o_proj": {"bits": 4, "group_size": 128}}, "o_proj.* has rows of 64, which groups of 128 do not divide"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_plans_are_named(tmp_path: Path, change: dict, message: str) -> None:
    source = source_of(tmp_path, num_attention_heads=4, head_dim=16)
    found = json.loads(uniform(source).to_json())
    for name, entry in change.items():
        found["tensors"][name] = entry
        if entry is None:
            del found["tensors"][name]
    (tmp_path / "bad.json").write_text(json.dumps(found))
    with pytest.raises(ConversionError, match=message):
        convert(source, tmp_path / "out", plan=tmp_path / "bad.json", **SETTINGS)
    assert not (tmp_path / "out").exists()


def uniform(source: Path) -> QuantizationPlan:
    """A plan with four bits everywhere."""
    planned = plan(open_checkpoint(source), Format(4, 64), True, None)
    return QuantizationPlan({output.name: Format(4, 64) for output in planned.outputs if isinstance(output.target, Format)})


def test_files_that_are_no_plans(tmp_path: Path) -> None:
    source = source_of(tmp_path)
    for text, message in (("{", "cannot be read"), ("[]", 'has no "tensors"'), ('{"tensors": {}}', 'has no "tensors"')):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ConversionError, match=message):
            convert(source, tmp_path / "out", plan=tmp_path / "bad.json", **SETTINGS)


@pytest.mark.parametrize("settings", [{"bits": 4, "bpw": 4.5}, {"bpw": 4.5, "target_kl": 0.1}, {"group_size": 64, "target_kl": 0.1}])
def test_contradictions(tmp_path: Path, settings: dict) -> None:
    with pytest.raises(ConversionError, match="each say how matrices are quantized: give one of them"):
        convert(tmp_path, tmp_path / "out", **settings)
    with pytest.raises(ConversionError, match="--bpw -1 is no such number"):
        convert(tmp_path, tmp_path / "out", bpw=-1)


def test_a_layer_may_stay_plain(tmp_path: Path) -> None:
    source = source_of(tmp_path)
    found = json.loads(uniform(source).to_json())
    found["tensors"]["model.layers.0.mlp.down_proj"] = False
    (tmp_path / "edited.json").write_text(json.dumps(found))
    convert(source, tmp_path / "out", plan=tmp_path / "edited.json", **SETTINGS)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization"]["model.layers.0.mlp.down_proj"] is False


def test_hulls_hold_what_is_best_for_some_price() -> None:
    choices = [FormatChoice(Format(4, 64), nbytes, cost) for nbytes, cost in ((1, 10.0), (2, 8.0), (3, 3.0), (4, 4.0), (5, 2.5), (6, 1.0))]
    assert [(each.nbytes, each.cost) for each in hull(choices)] == [(1, 10.0), (3, 3.0), (6, 1.0)]


def test_plans_are_as_good_as_trying_everything(tmp_path: Path) -> None:
    """Compares with all combinations on convex costs: the choice is best for its size."""
    planned = plan(open_checkpoint(source_of(tmp_path, num_hidden_layers=1)), Format(4, 64), True, None)
    outputs = [output for output in planned.outputs if isinstance(output.target, Format)][:3]
    rng = np.random.default_rng(0)
    items = []
    for output in outputs:
        costs = np.sort(rng.random(4))[::-1] * np.array([8.0, 4, 2, 1])
        items.append(
            Item(
                (output,),
                hull([FormatChoice(form, 100 * (n + 1), float(c)) for n, (form, c) in enumerate(zip(FORMATS[:4], costs, strict=True))]),
            )
        )
    fixed = planned.nbytes - sum(part.nbytes for output in outputs for part in output.parts())
    parameters = sum(math.prod(output.request.shape) for output in planned.outputs)
    combinations = [(a, b, c) for a in items[0].choices for b in items[1].choices for c in items[2].choices]
    for budget in (300, 500, 800, 1200):
        found = make_plan(planned, items, bpw=(fixed + budget + 0.5) * 8 / parameters, target_kl=None)
        taken = [next(c for c in item.choices if c.form == found.formats[item.outputs[0].name]) for item in items]
        size = sum(choice.nbytes for choice in taken)
        assert size <= budget
        assert found.kl == pytest.approx(min(sum(c.cost for c in some) for some in combinations if sum(c.nbytes for c in some) <= size))
