"""Random requests with and without images, in random schedules, answer as each does alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
from support.engines.drafting import Free, Guesser
from support.models.seeing import GOLDEN, cases, seeing_engine
from support.vision.table import NAMES, Prompt, answers, negative, prompt, sees, text_request

from mlxinfer import LLM
from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.engine.core.engine import Engine
from mlxinfer.engine.core.schedule import Schedule
from mlxinfer.engine.core.sequence import Sequence

REQUESTS = 8


class Wanted:
    """A request that can be made again."""

    def __init__(self, name: str, drawn: random.Random) -> None:
        case, other = drawn.choice(["one", "two", "turns"]), drawn.random() < 0.4
        asked = prompt(name, case).behind(drawn.choice([0, 0, 1, 13, 40, 64, 100]))
        asked = asked.with_pictures([negative(picture) for picture in cases(name)[case].pictures]) if other else asked
        self.asked: Prompt | None = None if drawn.random() < 0.2 else asked
        self.params: dict[str, Any] = {"temperature": drawn.choice([0.0, 1.0]), "seed": drawn.randrange(5), "count": drawn.randrange(1, 24)}

    def make(self) -> Sequence:
        return self.asked.request(**self.params) if self.asked is not None else text_request(**self.params)


def disturb(engine: Engine, drawn: random.Random, futures: dict[tuple[int, ...], list[int]]) -> None:
    """Have sequences lose their pages at random, and often have drafts that are right or wrong."""
    scheduler, schedule, share = engine.scheduler, engine.scheduler.schedule, drawn.choice([0, 0.05, 0.2])

    def sometimes_preempting() -> Schedule:
        if scheduler.running and drawn.random() < share:
            return Schedule(preempt=[drawn.choice(list(scheduler.running))])
        return schedule()

    scheduler.schedule = sometimes_preempting  # type: ignore[method-assign]
    if drawn.random() < 0.5:
        engine.proposer.times, engine.proposer.account.share = Free(), 1e9
        Guesser(engine.proposer, futures, drawn.randrange(100))


def check(name: str, seed: int) -> None:
    drawn = random.Random(seed)
    bits = drawn.choice([None, None, 8, 4])
    kv = KVFormat(bits, bits) if bits else None
    wanted = [Wanted(name, drawn) for _ in range(REQUESTS)]
    alone = [
        answers(seeing_engine(name, kv, max_num_batched_tokens=512, prefix_cache=False, ngrams=False), each.make())[0] for each in wanted
    ]
    limit = drawn.choice([0, 1, 20000, 1 << 20])
    settings = {"max_num_batched_tokens": drawn.choice([16, 17, 40, 64, 100, 256]), "max_num_seqs": drawn.choice([1, 2, 4, 8])}
    settings |= {"kv_cache_tokens": drawn.choice([1024, 4096]), "image_features_bytes": limit, "prefix_cache": drawn.random() < 0.8}
    engine = seeing_engine(name, kv, **settings)
    disturb(engine, drawn, {tuple(each.make().prompt): answer * 3 for each, answer in zip(wanted, alone, strict=True)})
    made, cancelled, added = [each.make() for each in wanted], set(), 0
    while added < REQUESTS or not engine.idle:
        while added < REQUESTS and drawn.random() < 0.35:
            engine.add(made[added])
            added += 1
        if not engine.idle:
            engine.step()
        if added and drawn.random() < 0.02 and not (chosen := drawn.choice(made[:added])).finish_reason:
            engine.abort(chosen)
            cancelled.add(chosen)
    for sequence, answer in zip(made, alone, strict=True):
        assert sequence in cancelled or sequence.answer == answer, (seed, settings)
    assert engine.encoder is not None
    assert engine.encoder.features.nbytes <= limit
    assert engine.encoder.features.pinned_bytes == 0


@pytest.mark.long
@sees("random schedules")
def test_random_requests(name: str) -> None:
    check(name, len(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(100, 140))
def test_many_random_requests(name: str, seed: int) -> None:
    check(name, seed)


@sees("long conversations")
def test_ten_turns_with_three_pictures(name: str) -> None:
    """Each turn begins with what is cached of the one before, but for the opening of its answer."""
    pictures = [*cases(name)["two"].pictures, *cases(name)["one"].pictures]
    messages: list[dict[str, Any]] = []
    before = 0
    with LLM(GOLDEN / name, dtype="float32", memory_gb=1, max_context=1024) as llm:
        for turn in range(10):
            content: list[dict[str, Any]] = [{"type": "text", "text": f"turn number {turn} of this conversation?"}]
            if turn in (0, 3, 6):
                content.insert(0, {"type": "image", "image": pictures[turn // 3]})
            messages.append({"role": "user", "content": content})
            usage = llm.chat(messages, temperature=0, max_tokens=8, ignore_eos=True).usage
            assert usage.stats.reused_tokens >= before - 16
            assert usage.stats.images_cached == (turn + 2) // 3, "every picture of earlier turns"
            assert usage.stats.images == turn // 3 + 1 - (turn == 9)
            before = usage.prompt_tokens
            messages.append({"role": "assistant", "content": "a red circle and a blue square"})
