from __future__ import annotations

import pytest

from mlxinfer.loading.find.known import find_known
from mlxinfer.loading.find.recommend import LEAST_SPEED, recommend

SLOW, FAST = 30e9, 800e9


@pytest.mark.parametrize("memory", [2, 5, 11, 24, 48, 96, 200])
@pytest.mark.parametrize("speed", [None, SLOW, FAST])
def test_what_is_recommended_fits(memory: float, speed: float | None) -> None:
    found = recommend(memory, speed)
    assert 1 <= len(found) <= 3
    for one in found:
        assert one.model.nbytes < memory * 1e9
        assert min(8192, one.model.context) <= one.context <= one.model.context
    assert len({one.model.family for one in found}) == len(found)


def test_more_memory_gives_a_longer_context_of_the_same_model() -> None:
    contexts = [{one.model.name: one.context for one in recommend(memory, None, 9)}["gemma4:e4b"] for memory in (6, 6.5, 8)]
    assert contexts == sorted(contexts)
    assert contexts[0] < contexts[-1]


def test_a_slow_memory_prefers_models_that_read_less() -> None:
    slow, fast = recommend(20, SLOW)[0], recommend(20, FAST)[0]
    assert slow.speed is not None
    assert slow.speed >= LEAST_SPEED
    assert slow.model.token_bytes < fast.model.token_bytes


def test_the_speed_is_the_bandwidth_over_the_bytes_of_a_token() -> None:
    found = recommend(48, FAST)[0]
    assert found.speed == FAST / found.model.token_bytes
    moe = find_known("qwen3.6:35b")
    assert moe is not None
    assert moe.token_bytes == pytest.approx(moe.nbytes * 3 / 35)


def test_nothing_fits() -> None:
    assert recommend(0.1, FAST) == []
