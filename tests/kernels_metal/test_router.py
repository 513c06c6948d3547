"""The choice of experts in one kernel, in the emulator, against float64."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxinfer.errors import UnsupportedShapeError
from mlxinfer.kernels_metal import emulator
from mlxinfer.kernels_metal.router.launcher import choose_experts
from mlxinfer.kernels_metal.router.reference import Rule
from tests.support.kernels.emulated import emulated, needs_emulator
from tests.support.oracles.sealed_pages import to_float

F32, F16, BF16 = mx.float32, mx.float16, mx.bfloat16
ALL = Rule(22, "sigmoid", True, 0.01, 1e-3, 2.5, 8, 4)
CASES = {
    # rows, experts, dtype, rule, with a bias, with gains
    "Qwen3": (7, 128, BF16, Rule(8, "softmax", True), False, False),
    "Qwen2": (33, 60, F32, Rule(4, "softmax"), False, False),
    "Mixtral": (1, 8, F16, Rule(2, "softmax", True), False, False),
    "Gemma 4": (7, 128, F32, Rule(8, "softmax", True), False, True),
    "gpt-oss": (7, 32, BF16, Rule(4, "none"), False, False),
    "GLM": (7, 160, F32, Rule(8, "sigmoid", True, added=1e-20), True, False),
    "DeepSeek V3": (7, 256, F32, Rule(8, "sigmoid", True, 0.0, 1e-20, 2.5, 8, 4), True, False),
    "DeepSeek V2": (7, 160, F32, Rule(6, "softmax", scale=16.0, groups=8, kept=3, ranked=1), False, False),
    "Kimi": (1, 384, F32, Rule(8, "sigmoid", True, added=1e-20, scale=2.8), True, False),
    "ERNIE": (33, 64, F32, Rule(6, "softmax", True, 1e-12), True, False),
    "Qwen3-Next": (1, 512, F16, Rule(10, "softmax", True), False, False),
    "Nemotron": (7, 512, F32, Rule(22, "sigmoid", True, added=1e-20, scale=5.0), True, False),
    "everything": (7, 384, F32, ALL, True, True),
    "one of one": (1, 1, F32, Rule(1, "softmax", True), True, False),
    "all": (1, 5, F32, Rule(5, "none"), False, True),
    "most": (1, 1024, F32, Rule(32, "softmax", groups=32, kept=16, ranked=8), True, False),
    "odd groups": (7, 45, F16, Rule(9, "sigmoid", groups=5, kept=2, ranked=3), False, False),
}


class Scene:
    """Random logits and vectors."""

    def __init__(self, name: str) -> None:
        rows, self.experts, dtype, self.rule, biased, gained = CASES[name]
        random = np.random.default_rng(self.experts)
        self.logits = mx.array((random.normal(size=(rows, self.experts)) * 3).astype(np.float32)).astype(dtype)
        vectors = [mx.array((random.normal(size=self.experts) * 0.3 + 1).astype(np.float32)) for _ in range(2)]
        self.bias, self.gains = vectors[0] if biased else None, vectors[1] if gained else None

    def run(self) -> tuple[np.ndarray, np.ndarray]:
        experts, shares = choose_experts(self.logits, self.rule, self.bias, self.gains)
        assert (experts.dtype, shares.dtype) == (mx.uint32, F32)
        return np.array(experts), np.array(shares)

    def exact(self) -> tuple[np.ndarray, np.ndarray]:
        """By sorting, in float64; the lowest of equal experts first."""
        rule, x = self.rule, to_float(self.logits).astype(np.float64)
        weights = np.exp(x - x.max(-1, keepdims=True))
        scores = {"none": x, "sigmoid": 1 / (1 + np.exp(-x)), "softmax": weights / weights.sum(-1, keepdims=True)}[rule.scores]
        wanted = scores + (0 if self.bias is None else np.array(self.bias, np.float64))
        grouped = wanted.reshape(len(x), rule.groups, -1)
        ranks = np.sort(grouped, axis=-1)[..., -rule.ranked :].sum(-1)
        kept = np.argsort(-ranks, axis=-1, kind="stable")[:, : rule.kept]
        inside = np.zeros(ranks.shape, bool)
        np.put_along_axis(inside, kept, True, axis=-1)
        wanted = np.where(inside[..., None], grouped, -np.inf).reshape(x.shape)
        best = np.argsort(-wanted, axis=-1, kind="stable")[:, : rule.chosen]
        shares = np.take_along_axis(weights if rule.scores == "none" else scores, best, axis=-1)
        total = shares.sum(-1, keepdims=True)
        shares = shares / total if rule.scores == "none" else shares
        shares = shares / (np.maximum(total, rule.least) + rule.added) if rule.normalized else shares
        return best, rule.scale * shares * (1 if self.gains is None else np.array(self.gains, np.float64)[best])


@needs_emulator
@pytest.mark.parametrize("name", CASES)
def test_experts_and_weights_are_those_of_float64(name: str) -> None:
    scene = Scene(name)
    with emulated():
        experts, shares = scene.run()
    best, exact = scene.exact()
    assert np.array_equal(experts, best)
    np.testing.assert_allclose(shares, exact, rtol=5e-6)


@needs_emulator
@pytest.mark.parametrize("mode", ["asan", "tsan", "msan"])
@pytest.mark.parametrize("name", ["everything", "all", "DeepSeek V2", "gpt-oss"])
def test_sanitizers_are_silent_and_no_schedule_changes_a_bit(name: str, mode: str) -> None:
    scene = Scene(name)
    with emulated(mode=mode, order="random", seed=2):
        found = scene.run()
    with emulated(order="reversed"):
        again = scene.run()
    for a, b in zip(found, again, strict=True):
        assert np.array_equal(a, b)


@needs_emulator
@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf, 0.0, -0.0])
@pytest.mark.parametrize("name", ["everything", "Qwen3", "gpt-oss", "odd groups"])
@pytest.mark.parametrize("whole", [True, False])
def test_experts_are_different_and_exist_whatever_the_logits(name: str, value: float, whole: bool) -> None:
    scene = Scene(name)
    logits = to_float(scene.logits).copy()
    logits[:, 0 : None if whole else logits.shape[1] // 2] = value
    scene.logits = mx.array(logits).astype(scene.logits.dtype)
    if whole:
        scene.bias = None
    with emulated(mode="asan", order="forward"):
        experts, _ = scene.run()
    assert experts.max() < scene.experts
    assert all(len(set(row)) == scene.rule.chosen for row in experts.tolist())
    if whole:
        assert np.array_equal(experts, np.broadcast_to(np.arange(scene.rule.chosen), experts.shape))


@needs_emulator
def test_not_a_number_is_chosen_last() -> None:
    scene = Scene("gpt-oss")
    logits = to_float(scene.logits).copy()
    logits[:, ::2] = np.nan
    scene.logits = mx.array(logits)
    with emulated():
        experts, shares = scene.run()
    assert np.all(experts % 2 == 1)
    np.testing.assert_allclose(shares.sum(-1), 1, rtol=1e-6)


@needs_emulator
def test_logits_are_loaded_once_and_results_stored_once() -> None:
    scene = Scene("Qwen3")
    with emulated(), emulator.count_bytes() as counts:
        scene.run()
    count, rows = counts.of("router"), len(scene.logits)
    assert count["logits"].fetched == scene.logits.nbytes
    assert count["logits"].most_loads <= 1 + 32  # the chosen ones again, and one by the lanes without a choice
    for name in ("experts", "shares"):
        assert (count[name].stored, count[name].most_stores) == (4 * rows * scene.rule.chosen, 1)


def test_what_does_not_fit_is_refused() -> None:
    logits = mx.zeros((2, 64))
    for rule in (Rule(65, "none"), Rule(0, "none"), Rule(2, "none", groups=5), Rule(17, "sigmoid", groups=4, kept=1), Rule(2, "tanh")):
        with pytest.raises(ValueError, match="64 experts do not fit"):
            choose_experts(logits, rule)
    with pytest.raises(ValueError, match=r"\[rows, experts\]"):
        choose_experts(logits[0], Rule(2, "none"))
    with pytest.raises(ValueError, match="a bias or gain"):
        choose_experts(logits, Rule(2, "none"), mx.zeros((63,)))
    for large, rule in (((1, 1025), Rule(2, "none")), ((1, 64), Rule(33, "none")), ((1, 66), Rule(2, "none", groups=33, kept=2))):
        with pytest.raises(UnsupportedShapeError, match="no choice of"):
            choose_experts(mx.zeros(large), rule)
    with pytest.raises(UnsupportedShapeError, match="from int32"):
        choose_experts(logits.astype(mx.int32), Rule(2, "none"))
