"""The prefill budget on simulated devices: answers keep their share, and prompts get the rest."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.processes.examples import examples

from mlxinfer.engine.core.prefill_budget import PrefillBudget
from mlxinfer.engine.core.step_times import StepTimes

Device = Callable[[int, int, int], float]
DEVICES: dict[str, Device] = {
    "linear": lambda n, p, depth: 0.0025 + 0.0005 * (n + p) + 1e-7 * depth * (p > 0),
    "free rows": lambda n, p, depth: max(0.01 + 0.0001 * n, 0.002 + 0.0002 * (n + p)) + 0.0005 * (p > 0),
    "costly chunks": lambda n, p, depth: 0.008 + 0.0002 * n + (0.006 + 0.00008 * p + 2e-7 * depth) * (p > 0),
    "slow": lambda n, p, depth: 0.15 + 0.01 * (n + p),
}
STEPS = 400


def observe(budget: PrefillBudget, decode_rows: int, prefill_rows: int, seconds: float) -> None:
    budget.times.observe(decode_rows, prefill_rows, seconds)
    budget.observe(decode_rows, prefill_rows, seconds)


def simulate(device: Device, n: int, share: float, noise: Callable[[], float], budget: PrefillBudget) -> list[tuple[int, float, float]]:
    """(prompt rows, seconds, seconds alone) of each step while a prompt without end is read; one step is always in flight."""
    pending: deque[tuple[int, int, float]] = deque()
    log, depth = [], 0
    for step in range(STEPS + 20):
        rows = budget.allowance(n, 10**6, 512 - n, 10**6) if step >= 20 else 0
        assert 0 <= rows <= 512 - n
        if rows:
            budget.commit(n, rows)
        else:
            budget.plain[n] += 1
        seconds = device(n, rows, depth) * noise()
        log.append((rows, seconds, device(n, 0, depth)))
        pending.append((n, rows, seconds))
        depth += rows
        if len(pending) > 1:
            observe(budget, *pending.popleft())
    return log[20:]


def ideal(device: Device, n: int, share: float, depth: int) -> float:
    """Rows of prompts per second, if costs were known: the best mixture of two sizes whose costs meet what a step may cost."""
    alone = device(n, 0, depth)
    income = alone * (1 / share - 1)
    most = max(0.1, 2 * alone)
    points = [(0, 0.0)] + [(p, device(n, p, depth) - alone) for p in range(1, 513 - n) if device(n, p, depth) <= most]
    under = [(p, x) for p, x in points if x <= income]
    over = [(p, x) for p, x in points if x > income]
    best = max(p for p, _ in under)
    mixed = (p + (income - x) / (y - x) * (q - p) for p, x in under for q, y in over)
    return max(best, max(mixed, default=0.0)) / (alone / share)


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("n", [1, 4, 15])
@pytest.mark.parametrize("share", [0.75, 0.9])
def test_answers_keep_their_share_and_prompts_get_the_rest(name: str, n: int, share: float) -> None:
    device = DEVICES[name]
    log = simulate(device, n, share, lambda: 1.0, PrefillBudget(StepTimes(), share=share, max_step_s=0.1))
    seconds = sum(s for _, s, _ in log)
    assert len(log) / sum(s / alone for _, s, alone in log) >= share * 0.97
    assert max(s for _, s, _ in log) <= max(0.1, 2 * log[0][2]) * 1.1
    read = sum(rows for rows, _, _ in log)
    assert read / seconds >= 0.7 * ideal(device, n, share, read // 2)


@settings(max_examples=examples(30), deadline=None)
@given(st.sampled_from(sorted(DEVICES)), st.integers(1, 15), st.integers(0, 2**16))
def test_with_noise_and_hiccups(name: str, n: int, seed: int) -> None:
    rng = random.Random(seed)

    def noise() -> float:
        return (1 + abs(rng.gauss(0, 0.05))) * (3 if rng.random() < 0.01 else 1)

    log = simulate(DEVICES[name], n, 0.75, noise, PrefillBudget(StepTimes(), share=0.75, max_step_s=0.1))
    alone = sum(a for _, _, a in log)
    usual = 1.06
    assert sum(s for _, s, _ in log) * 0.75 <= alone * usual * 1.1
    assert sum(rows for rows, _, _ in log) > 0


@pytest.mark.parametrize("name", ["free rows", "slow"])
def test_windows_of_twenty_steps_keep_their_share_but_for_one_chunk(name: str) -> None:
    log = simulate(DEVICES[name], 1, 0.75, lambda: 1.0, PrefillBudget(StepTimes(), share=0.75, max_step_s=0.1))
    for start in range(len(log) - 20):
        window = log[start : start + 20]
        chunk = max(s - alone for _, s, alone in window)
        assert 0.75 * (sum(s for _, s, _ in window) - chunk) <= sum(alone for _, _, alone in window) * 1.03


def test_nothing_wild_before_anything_is_measured() -> None:
    budget = PrefillBudget(StepTimes(), share=0.75, max_step_s=0.1)
    assert budget.allowance(1, 5000, 500) == 0
    assert budget.allowance(0, 5000, 500) == 500
    budget.plain[1] += 1
    observe(budget, 1, 0, 0.003)
    assert 1 <= budget.allowance(1, 5000, 500) <= 16


def test_a_short_prompt_is_read_at_once_and_paid_back() -> None:
    device, budget = DEVICES["linear"], PrefillBudget(StepTimes(), share=0.75, max_step_s=0.1)
    simulate(device, 1, 0.75, lambda: 1.0, budget)
    for _ in range(5):
        budget.plain[1] += 1
        observe(budget, 1, 0, device(1, 0, 0))
    assert budget.allowance(1, 20, 500, 20) == 20
    budget.commit(1, 20)
    observe(budget, 1, 20, device(1, 20, 0))
    assert budget.balance < 0
    assert budget.allowance(1, 20, 500, 20) == 0


def test_a_share_has_to_be_a_share() -> None:
    with pytest.raises(ValueError, match="share"):
        PrefillBudget(StepTimes(), share=1.5, max_step_s=0.1)


def test_other_work_waits_until_answers_had_their_share() -> None:
    budget = PrefillBudget(StepTimes(), share=0.8, max_step_s=0.1)
    for _ in range(20):
        budget.plain[1] += 1
        observe(budget, 1, 0, 0.02)
    assert budget.may_spend()
    balance = budget.balance
    budget.spend(balance + 0.05)
    waited = 0
    while not budget.may_spend():
        budget.plain[1] += 1
        observe(budget, 1, 0, 0.02)
        waited += 1
    assert waited == pytest.approx(0.05 / (0.02 * (1 / 0.8 - 1)), abs=1)
    budget.spend(1000.0)
    assert budget.balance >= -4 * 0.1
