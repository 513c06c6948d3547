"""The device has its next step before the host reads the last one, and pools are written in place."""

from __future__ import annotations

from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from support.engines.tiny_engine import greedy, request, run, tiny_engine

from mlxinfer.cache.attention import select
from mlxinfer.cache.base import PAGE
from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.cache.store import LayerStore
from mlxinfer.engine.core import prefill_budget
from mlxinfer.engine.core.engine import Engine
from mlxinfer.engine.core.events import Event
from mlxinfer.engine.core.prefill_budget import PrefillBudget
from mlxinfer.engine.core.step_times import StepTimes
from mlxinfer.engine.runner.model_runner import PendingStep

PROMPT = np.random.default_rng(5).integers(3, 96, 4096).tolist()


@pytest.fixture
def drains(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each step after which the device had nothing to do until the host had sealed, scheduled and built the next one."""
    found: list[int] = []
    collect = Engine._collect_pending

    def counted(self: Engine, events: list[Event]) -> None:
        if self._pending is not None:
            found.append(self._pending.schedule.prefill_rows + self._pending.schedule.decode_rows)
        collect(self, events)

    monkeypatch.setattr(Engine, "_collect_pending", counted)
    return found


@pytest.fixture
def a_fast_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of rows is read in time."""
    monkeypatch.setattr(prefill_budget, "_QUIET_S", 1000.0)


def test_storing_pages_does_not_wait(monkeypatch):
    """Nothing that is sealed is read on the host, so that `commit` may not wait for it."""
    engine = tiny_engine(kv=KVFormat(4, 4), prefix_cache=False)
    engine.add(request(PROMPT[:150], 8))
    seal, submit = engine.cache.seal, engine.cache.submit

    def refused(*_):
        raise AssertionError("the host waits")

    def alone(function):
        def call(*args):
            with monkeypatch.context() as patch:
                patch.setattr(mx, "eval", refused)
                function(*args)

        return call

    sealed = []
    monkeypatch.setattr(engine.cache, "seal", lambda *args: (sealed.append(args), alone(seal)(*args)))
    monkeypatch.setattr(engine.cache, "submit", alone(submit))
    while not engine.idle:
        engine.step()
    assert len(sealed) == 2


@pytest.mark.parametrize(
    ("name", "kv"),
    [
        ("llama", "16"),
        *(pytest.param(*more, marks=pytest.mark.long) for more in (("gemma3_text", "4"), ("qwen3_next", "16"))),
        *(pytest.param(*more, marks=pytest.mark.slow) for more in (("llama", "4"), ("gemma3_text", "16"), ("qwen3_next", "4"))),
    ],
)
def test_a_filled_page_drains_nothing(name, kv, drains, monkeypatch):
    """A sequence that fills pages while it is read and while it answers."""
    order: list[str] = []
    wait, submit = PendingStep.wait, PendingStep.submit
    monkeypatch.setattr(PendingStep, "wait", lambda self: (order.append("wait") if self._awaited else None, wait(self))[1])
    monkeypatch.setattr(PendingStep, "submit", lambda self: (order.append("submit"), submit(self))[1])
    engine = tiny_engine(name, KVFormat.parse(kv), max_draft=0)
    answer = run(engine, [request(PROMPT[:100], 140)])[0]
    assert drains == []
    assert order.count("wait") == 239 // PAGE
    # The next step is there to be submitted as soon as the pages are full.
    assert all(after == "submit" for before, after in pairwise(order) if before == "wait")
    if name == "llama" and kv == "16":
        assert answer[:40] == greedy(PROMPT[:100], 40)


def addresses(engine: Engine) -> list[int]:
    return [np.array(a, copy=False).ctypes.data for store in engine.cache._stores.values() for a in store.sealed]


@pytest.mark.parametrize("kv", ["16", "4"])
def test_pools_are_written_where_they_lie(kv):
    """Sealing before the step has ended must not make MLX copy a pool that the step still reads."""
    engine = tiny_engine(kv=KVFormat.parse(kv), max_draft=0, prefix_cache=False)
    engine.add(request(PROMPT[:20], 230))
    while len(engine.cache.pool.slots) == 0 or not engine.cache._stores[0].sealed[0].shape[1]:
        engine.step()
    mx.synchronize()
    before, size = addresses(engine), engine.cache._stores[0].sealed[0].shape
    while not engine.idle:
        engine.step()
    assert engine.cache._stores[0].sealed[0].shape == size
    assert addresses(engine) == before


@pytest.mark.usefixtures("a_fast_device")
def test_a_long_prompt_is_read_in_three_steps(drains):
    """As a GPU reads it, where memory allows 2048 rows: 512 to learn how fast it is, then as much as a second reads."""
    settings = {"max_context": 8192, "kv_cache_tokens": 8192, "max_num_batched_tokens": 2048, "max_draft": 0}
    engine = tiny_engine(**settings)
    engine.add(request(PROMPT, 2))
    rows = []
    while not engine.idle:
        engine.step()
        if engine._pending is not None:
            rows.append(engine._pending.schedule.prefill_rows)
    assert [n for n in rows if n] == [512, 2048, 1536]
    assert drains == [512]


@pytest.mark.parametrize(("row_s", "rows"), [(1e-4, 2048), (1 / 1500, 1500), (1 / 300, 300), (0.1, 256)])
def test_a_step_that_only_reads_takes_about_a_second(row_s, rows):
    times = StepTimes()
    budget = PrefillBudget(times, share=0.8, max_step_s=0.1)
    assert budget.allowance(0, 4096, 2048) == 512
    times.observe(0, 512, 2 + 512 * row_s)  # the first one waits for a compiler
    for _ in range(3):
        count = budget.allowance(0, 4096, 2048)
        times.observe(0, count, count * row_s)
    assert abs(budget.allowance(0, 4096, 2048) - rows) <= 1
    times.observe(0, 20, 1.0)  # short: says little about a row
    assert abs(budget.allowance(0, 4096, 2048) - rows) <= 1
    assert budget.allowance(0, 100, 2048) == 100


@pytest.mark.usefixtures("a_fast_device")
def test_long_steps_join_less_of_the_past(monkeypatch):
    """In plain MLX, which a GPU uses for prompts at 16 bits, each step joins all of the past once more."""
    monkeypatch.setattr(select.kernels_cpu, "in_use", lambda: False)
    monkeypatch.setattr(prefill_budget, "_QUIET_ROWS", 128)
    past, joined = LayerStore.past, []
    monkeypatch.setattr(LayerStore, "past", lambda self, pages, *more: (joined.append(len(pages)), past(self, pages, *more))[1])

    def pages_joined(rows: int) -> int:
        joined.clear()
        engine = tiny_engine(max_context=8192, kv_cache_tokens=8192, max_num_batched_tokens=rows, max_draft=0, prefix_cache=False)
        run(engine, [request(PROMPT[:512], 1)])
        return sum(joined) // len(engine.cache.layers)

    assert pages_joined(128) == (128 + 256 + 384) // PAGE
    assert pages_joined(512) == 128 // PAGE
