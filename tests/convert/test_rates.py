"""What a conversion is expected to take, from rates of the code that will do it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from support.models.checkpoints import config_of, random_checkpoint

from mlxinfer import kernels_cpu
from mlxinfer.convert.plan import rates, resources
from mlxinfer.convert.plan.weight_map import ConversionPlan, plan
from mlxinfer.loading.directory import SafetensorsCheckpoint
from mlxinfer.nn.weights import Format

SMALL: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "head_dim": 32}


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> ConversionPlan:
    source = random_checkpoint(tmp_path_factory.mktemp("rates") / "source", config_of("llama", **SMALL), dtype=mx.bfloat16)
    return plan(SafetensorsCheckpoint(source), Format(4, 64), True, None)


@pytest.mark.skipif(not kernels_cpu.in_use(), reason="the CPU kernels are not in use")
def test_products_are_timed_with_the_kernels_that_compute_them(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[tuple[int, ...]] = []
    pack = kernels_cpu.pack

    def note(weight: mx.array) -> kernels_cpu.Packed:
        packed.append(tuple(weight.shape))
        return pack(weight)

    monkeypatch.setattr(kernels_cpu, "pack", note)
    monkeypatch.setattr(rates, "_SIDE", 128)
    assert rates.seconds_per_product() > 0
    assert packed == [(128, 128)]


def test_what_gptq_does_is_counted_apart(planned: ConversionPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights 1 s each, products 1 ms, sums 10 ms, and so on, so that the parts of the total can be told apart."""
    for name, rate in (("weight", 1.0), ("product", 1e-3), ("channel", 1e-5), ("sum", 1e-2), ("cube", 1e-4)):
        monkeypatch.setattr(resources, f"seconds_per_{name}", lambda *args, rate=rate: rate)
    monkeypatch.setattr(resources, "seconds_to_sample", lambda parameters, tokens: 7e9)
    matrices = [output for output in planned.outputs if output.action == "quantized"]
    weights = sum(output.request.shape[0] * output.request.shape[1] for output in matrices)
    layers = sum(output.request.shape[0] * output.request.shape[1] for output in matrices if ".layers." in output.name)
    channels = sum(sum(output.request.shape) for output in matrices if ".layers." in output.name)
    per_token = layers * 1e-3 + channels * 1e-5
    fit = weights + 10 * per_token
    assert resources.estimate(planned, "fit", 10, 0).seconds == pytest.approx(fit)
    inputs = [64, 64, 128] * 2  # attention's (the output projection is as wide as what the others read), gate and up, down
    more = sum(size**2 for size in inputs) * 10 * 1e-2 + sum(size**3 for size in inputs) * 1e-4
    assert resources.estimate(planned, "gptq", 10, 0).seconds == pytest.approx(fit + more)
    assert resources.estimate(planned, "gptq", 10, 0, own_samples=True).seconds == pytest.approx(fit + more + 7e9)
    assert resources.estimate(planned, "minmax", 10, 0).seconds == weights
    found = 4 * 7 * per_token + 7 * sum(size**2 for size in inputs) * 1e-2  # forward, once more, and two products back
    tried = len(resources.FORMATS) * weights  # all rows are sampled: there are few
    assert resources.estimate(planned, "fit", 10, 0, planning=7).seconds == pytest.approx(fit + found + tried)


def test_experts_that_are_not_chosen_take_no_time(planned: ConversionPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, rate in (("weight", 0.0), ("product", 1.0), ("channel", 0.0)):
        monkeypatch.setattr(resources, f"seconds_per_{name}", lambda *args, rate=rate: rate)
    layer = next(output for output in planned.outputs if output.action == "quantized" and ".layers." in output.name)
    experts = replace(layer, request=replace(layer.request, shape=(8, 16, 64)))
    one = replace(planned, outputs=(experts,), config={**planned.config, "num_experts_per_tok": 2})
    assert resources.estimate(one, "fit", 3, 0).seconds == 2 * 16 * 64 * 3


def test_rates_are_those_of_a_machine(planned: ConversionPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "_SIDE", 128)
    output = next(output for output in planned.outputs if output.action == "quantized")
    found = [rates.seconds_per_weight(output, encoder) for encoder in ("minmax", "fit", "gptq")]
    found += [rates.seconds_per_sum(), rates.seconds_per_cube(), rates.seconds_per_channel()]
    assert all(0 < each < 1e-2 for each in found)
