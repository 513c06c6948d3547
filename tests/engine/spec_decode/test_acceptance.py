"""Draft lengths on simulated devices: never much slower than without drafts, and near the best length where there is one."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.processes.examples import examples

from mlxinfer.engine.core.step_times import StepTimes
from mlxinfer.engine.spec_decode.acceptance import Acceptance, Candidate, best_lengths
from mlxinfer.engine.spec_decode.ngram import MatchStats
from mlxinfer.engine.spec_decode.proposer import GainAccount

MOST = 8


class Device:
    """Seconds of a step: `base`, and `slope` for each row more; `wait` where it cannot be submitted ahead; noise on top."""

    def __init__(self, base=3e-3, slope=0.1, wait=0.1, turn=0.0, noise=0.0, seed=0):
        self.base, self.slope, self.wait, self.turn, self.noise = base, slope, wait, turn, noise
        self.random = random.Random(seed)

    def seconds(self, rows, *, drained, turns=0):
        exact = self.base * (1 + self.slope * (rows - 1) + self.wait * drained + self.turn * turns)
        return exact * (1 + self.noise * self.random.random())


def simulate(device, tokens, chance, known=None):
    """Tokens a second of one sequence; `chance(i)` is that a draft is right when i tokens have been said. `known` is what has been learnt
    before."""
    times, account, acceptance = known or (StepTimes(), GainAccount(), Acceptance())
    said, total, draws = 0, 0.0, random.Random(1)
    while said < tokens:
        prospect = Candidate(acceptance.chances(MOST), device.turn * device.base)
        count = best_lengths([prospect], 1, times)[0][0] if account.open else 0
        accepted = 0
        while accepted < count and draws.random() < chance(said + accepted):
            accepted += 1
        seconds = device.seconds(1 + count, drained=bool(count), turns=count)
        if count:
            acceptance.learn(count, accepted)
            times.observe(1 + count, 0, seconds - device.turn * device.base * count, waited=True)
            account.round(seconds, times.step(1) * (1 + accepted))
        else:
            times.observe(1, 0, seconds, waited=False)
            account.plain(seconds)
        said += 1 + accepted
        total += seconds
    return said / total


def plain(device):
    return 1 / (device.base * (1 + device.noise / 2))


def fixed(device, chance, count):
    expected = sum(chance**i for i in range(count + 1))
    return expected / device.seconds(1 + count, drained=count > 0, turns=count)


@settings(max_examples=examples(60))
@given(
    chance=st.floats(0, 1),
    slope=st.floats(0.01, 1),
    wait=st.floats(0, 0.6),
    turn=st.floats(0, 1),
    noise=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 9),
)
def test_never_much_slower_than_without(chance, slope, wait, turn, noise, seed):
    device = Device(slope=slope, wait=wait, turn=turn, noise=noise, seed=seed)
    assert simulate(device, 400, lambda i: chance) > 0.95 * plain(device)


@pytest.mark.parametrize("period", [10, 37, 150])
@pytest.mark.parametrize("slope", [0.05, 0.3, 0.9])
def test_acceptance_that_changes_is_no_trap(period, slope):
    device = Device(slope=slope, turn=0.1)
    assert simulate(device, 600, lambda i: float(i // period % 2)) > 0.95 * plain(device)


@pytest.mark.long
@pytest.mark.parametrize("chance", [0.0, 0.3, 0.5, 0.7, 0.9, 1.0])
@pytest.mark.parametrize("slope", [0.02, 0.1, 0.25, 0.6])
def test_near_the_best_length_where_acceptance_is_constant(chance, slope):
    device = Device(slope=slope)
    best = max(fixed(device, chance, count) for count in range(MOST + 1))
    known = StepTimes(), GainAccount(), Acceptance()
    simulate(device, 1000, lambda i: chance, known)
    reached = simulate(device, 4000, lambda i: chance, known)
    # What brings little is not looked for.
    assert reached > 0.92 * best or (best < 1.15 * plain(device) and reached > 0.98 * plain(device))


def test_nothing_is_drafted_before_a_step_has_been_measured():
    assert best_lengths([Candidate([1.0, 1.0])], 1, StepTimes()) == ([0], 1.0)


def test_a_draft_that_never_holds_is_not_made_however_short_a_round_seems():
    times = StepTimes()
    times.observe(1, 0, 2.0, waited=False)
    times.observe(2, 0, 1.0, waited=True)
    assert best_lengths([Candidate([0.0], 0.1)], 1, times) == ([0], 1.0)
    assert best_lengths([Candidate([0.1], 0.1)], 1, times)[0] == [1]


def test_sequences_share_a_step_and_the_likeliest_drafts_go_first():
    times = StepTimes()
    for rows in range(1, 20):
        times.observe(rows, 0, 1 + 0.25 * (rows - 1), waited=True)
        times.observe(rows, 0, 1 + 0.25 * (rows - 1), waited=False)
    lengths, gain = best_lengths([Candidate([0.95, 0.9, 0.85]), Candidate([0.2, 0.04]), Candidate([0.9, 0.3])], 3, times)
    assert lengths == [3, 0, 1]
    assert gain > 1


def test_a_slower_machine_does_not_change_what_pays():
    times = StepTimes()
    for rows in (1, 2, 4, 8) * 8:
        times.observe(rows, 0, 1 + 0.1 * (rows - 1), waited=rows > 1)
    before = times.round(8) / times.step(1)
    for _ in range(200):
        times.observe(1, 0, 5.0, waited=False)
    assert times.round(8) / times.step(1) == pytest.approx(before, rel=0.35)


def test_longer_matches_are_trusted_more_and_both_are_learnt():
    foresight = MatchStats()
    assert foresight.chance(2) < foresight.chance(5) < foresight.chance(40)
    for _ in range(300):
        foresight.learn(2, True)
        foresight.learn(40, False)
    assert foresight.chance(2) > 0.95
    assert foresight.chances(40, 8) == []
