"""Images that wait, are cancelled, evicted, preempted or fail: no sequence loses its image, and others continue."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.engines.tiny_engine import UNMEASURED, run
from support.models.seeing import Picture, case_request, cases, seeing, seeing_engine, seeing_request

from mlxinfer.engine.core import engine as engine_module
from mlxinfer.engine.core.engine import Engine
from mlxinfer.engine.core.events import Ended
from mlxinfer.engine.core.image_encoder import IMAGE_FAILED
from mlxinfer.engine.core.sequence import Sequence as EngineSequence
from mlxinfer.types import SamplingParams

NAMES = sorted(cases())
ONE_BLOCK = {"max_step_s": 1e-9}
"""A loop of the engine computes one block of the tower."""
TEXT = [7, 31, 5, 100, 42, 9, 9, 250, 3]


def text_request(limit: int = 200) -> EngineSequence:
    return EngineSequence(list(TEXT), SamplingParams(temperature=0.0), 0, len(TEXT) + limit)


def pictures(count: int, seed: int = 5) -> list[Picture]:
    """Random pictures of different sizes."""
    random = np.random.default_rng(seed)
    return [random.integers(0, 256, (*random.integers(20, 200, 2), 3), dtype=np.uint8) for _ in range(count)]


def message(count: int = 1) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*({"type": "image"} for _ in range(count)), {"type": "text", "text": "and what is that?"}]}]


def finish(engine: Engine) -> None:
    while not engine.idle:
        engine.step()


def nothing_left(engine: Engine) -> None:
    """All slots are free, and no features are pinned."""
    assert engine.encoder is not None
    engine.encoder.due()
    assert not engine.encoder.busy
    assert not engine.encoder.features.pinned_bytes
    assert not engine.cache.pool.slots


def test_other_sequences_get_a_token_between_two_slices() -> None:
    engine, text, pictured = seeing_engine(**ONE_BLOCK, decode_share=1e-6), text_request(), case_request("two")
    engine.add(text)
    while len(text.answer) < 3:
        engine.step()
    engine.add(pictured)
    engine.step()
    slices, before = 0, len(text.answer)
    while not pictured.num_computed_tokens >= pictured.images.runs[-1].start:
        engine.step()
        slices += 1
    assert slices > 2 * 3 * 2  # two images of more than one pass of three blocks
    assert len(text.answer) - before >= slices - 2
    finish(engine)
    assert pictured.answer == cases()["two"].greedy
    assert text.answer == run(seeing_engine(), [text_request()])[0]


def test_text_before_an_image_is_computed_while_it_is_encoded() -> None:
    engine, case = seeing_engine(**ONE_BLOCK), cases()["turns"]
    sequence = case_request("turns")
    engine.add(sequence)
    for _ in range(3):
        engine.step()
    assert sequence.num_computed_tokens == sequence.images.runs[0].start
    finish(engine)
    assert sequence.answer == case.greedy


def test_an_image_of_several_sequences_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tower = seeing().vision.tower
    encoded, stages = [], type(tower).stages

    def counted(self: Any, pixels: mx.array, sizes: Sequence[tuple[int, int]]) -> Generator[mx.array, None, Any]:
        encoded.append(sizes)
        return stages(self, pixels, sizes)

    monkeypatch.setattr(type(tower), "stages", counted)
    sequences = [case_request("one") for _ in range(3)]
    assert run(seeing_engine(**UNMEASURED, prefix_cache=False), sequences) == [cases()["one"].greedy] * 3
    assert sum(map(len, encoded)) == len(sequences[0].images.images[0].layout.pieces)


@pytest.mark.parametrize("limit", [0, 1, 8000, 1 << 28])
def test_features_are_bounded_and_never_missing(limit: int) -> None:
    shown = pictures(6)
    alone = [run(seeing_engine(), [seeing_request(message(), [each], 5)])[0] for each in shown]
    engine = seeing_engine(image_features_bytes=limit, max_num_batched_tokens=16, prefix_cache=False)
    many = seeing_request(message(6), shown, 5)
    sequences = [seeing_request(message(), [each], 5) for each in [*shown, *shown]]
    answers = run(engine, [*sequences[:3], many, *sequences[3:]])
    assert [*answers[:3], *answers[4:]] == [*alone, *alone]
    assert answers[3] == run(seeing_engine(max_num_batched_tokens=500), [seeing_request(message(6), shown, 5)])[0]
    nothing_left(engine)
    assert engine.encoder.features.nbytes <= limit


def test_pictures_without_end_leave_no_growth() -> None:
    engine = seeing_engine(image_features_bytes=100_000)
    for picture in pictures(60):
        run(engine, [seeing_request(message(), [picture], 1)])
    features = engine.encoder.features
    assert features.nbytes <= 100_000
    assert 0 < len(features) < 60
    nothing_left(engine)


@pytest.mark.parametrize("after", range(0, 30, 3))
def test_cancelling_at_any_moment_harms_nobody(after: int) -> None:
    engine = seeing_engine(**ONE_BLOCK, max_num_batched_tokens=16)
    victim, same, other = case_request("two"), case_request("two"), case_request("one")
    for sequence in (victim, same, other):
        engine.add(sequence)
    for _ in range(after):
        engine.step()
    engine.abort(victim)
    finish(engine)
    assert same.answer == cases()["two"].greedy
    assert other.answer == cases()["one"].greedy
    nothing_left(engine)


def test_a_cancelled_request_leaves_its_queued_images_unencoded() -> None:
    engine, sequence = seeing_engine(**ONE_BLOCK), case_request("two")
    engine.add(sequence)
    engine.step()
    engine.abort(sequence)
    engine.step()
    assert engine.idle
    nothing_left(engine)
    assert len(engine.encoder.features) == 0


@pytest.mark.parametrize("limit", [0, 1 << 28])
@pytest.mark.parametrize("after", range(1, 26, 4))
def test_preempted_sequences_keep_their_images(after: int, limit: int) -> None:
    engine = seeing_engine(max_num_batched_tokens=24, image_features_bytes=limit, prefix_cache=limit == 0, **ONE_BLOCK)
    sequence = case_request("turns")
    engine.add(sequence)
    for _ in range(after):
        engine.step()
    engine._collect_pending([])
    if sequence in engine.scheduler.running:
        engine.kv_cache_manager.preempt(sequence)
        engine.proposer.forget(sequence)
    finish(engine)
    assert sequence.answer == cases()["turns"].greedy
    nothing_left(engine)


def test_few_pages_preempt_and_finish() -> None:
    engine = seeing_engine(kv_cache_tokens=320, max_num_batched_tokens=32, image_features_bytes=0, max_num_seqs=4)
    sequences = [case_request(NAMES[which % len(NAMES)]) for which in range(8)]
    assert run(engine, sequences) == [cases()[NAMES[which % len(NAMES)]].greedy for which in range(8)]
    nothing_left(engine)


@pytest.mark.parametrize("after", [2, 9, 30])
def test_a_failed_kernel_does_not_lose_images(after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = seeing_engine(max_num_batched_tokens=16, **ONE_BLOCK)
    sequences = [case_request(name) for name in NAMES]
    for sequence in sequences:
        engine.add(sequence)
    for _ in range(after):
        engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "disable_guilty", lambda *_, **__: True)
        patch.setattr(engine.runner, "submit", _broken)
        while engine.runner.__dict__.get("submit") is _broken:
            engine.step()
    finish(engine)
    assert [s.answer for s in sequences] == [cases()[name].greedy for name in NAMES]
    nothing_left(engine)


def _broken(*_: object) -> None:
    raise RuntimeError("a kernel failed")


def test_a_failure_of_the_tower_ends_only_those_who_wait_for_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(7)
    bad, good = (random.integers(0, 256, shape, dtype=np.uint8) for shape in ((60, 180, 3), (90, 80, 3)))
    engine, text = seeing_engine(**ONE_BLOCK), text_request(30)
    first, second, third = (seeing_request(message(), [each], 5) for each in (bad, good, bad))
    pair = seeing_request(message(2), [good, bad], 5)
    samples = [seeing_request(message(), [bad], 5, index=i, temperature=1.0) for i in range(3)]
    samples[0].lead(samples[1:])
    tower, stages = seeing().vision.tower, type(seeing().vision.tower).stages
    rows = len(first.images.images[0].pixels.values)
    assert rows != len(second.images.images[0].pixels.values)

    def failing(self: Any, pixels: mx.array, sizes: Sequence[tuple[int, int]]) -> Generator[mx.array, None, Any]:
        found = yield from stages(self, pixels, sizes)
        if pixels.shape[0] == rows:
            raise RuntimeError("[malloc] Unable to allocate 1 bytes.")
        return found

    sequences = [text, first, second, third, pair, samples[0]]
    for sequence in sequences:
        engine.add(sequence)
    events = []
    with monkeypatch.context() as patch:
        patch.setattr(type(tower), "stages", failing)
        while not engine.idle:
            events += engine.step()
    ended = {event.sequence for event in events if isinstance(event, Ended)}
    assert ended == {first, third, pair, *samples}
    for sequence in ended:
        assert sequence.finish_reason == "error"
        assert sequence.error.startswith(IMAGE_FAILED)
    height, width = first.images.images[0].layout.resized
    assert f"image 1 of the prompt ({width} x {height} pixels" in first.error
    assert "image 2 of the prompt" in pair.error
    assert "Unable to allocate" in pair.error
    assert len(second.answer) == 5
    assert len(text.answer) == 30
    nothing_left(engine)
    assert run(engine, [seeing_request(message(), [bad], 5)]) == run(seeing_engine(), [seeing_request(message(), [bad], 5)])


def test_deterministic_answers_do_not_depend_on_the_crowd() -> None:
    settings = {"deterministic": True, "max_num_batched_tokens": 80}
    alone = [run(seeing_engine(**settings), [case_request(name, logprobs=1)])[0] for name in NAMES]
    crowd = [case_request(name, logprobs=1) for name in NAMES]
    assert run(seeing_engine(**settings, **ONE_BLOCK), [text_request(20), *crowd])[1:] == alone
    assert alone == [cases()[name].greedy for name in NAMES]


@pytest.mark.parametrize("limit", [0, 1])
@pytest.mark.parametrize("family", ["smolvlm", "qwen3_vl", "gemma3"])
def test_few_features_stall_no_deterministic_request(family: str, limit: int) -> None:
    """Two images share a page, and the limit has room for the features of one at most."""
    engine = seeing_engine(family, deterministic=True, image_features_bytes=limit)
    sequence = case_request("two", family=family)
    engine.add(sequence)
    for _ in range(1000):
        if not engine.idle:
            engine.step()
    assert sequence.answer == cases(family)["two"].greedy
    nothing_left(engine)


def test_an_idle_engine_forgets_the_images_of_a_cancelled_request() -> None:
    engine, sequence = seeing_engine(**ONE_BLOCK), case_request("two")
    engine.add(sequence)
    for _ in range(3):
        engine.step()
    engine._collect_pending([])
    engine.abort(sequence)
    assert engine.idle
    assert engine.encoder.busy
    while engine.tidy():
        pass
    assert not engine.encoder.busy
    assert not engine.encoder._users


def test_an_interrupt_inside_the_tower_leaves_a_fresh_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, sequence = seeing_engine(**ONE_BLOCK), case_request("two")
    engine.add(sequence)
    for _ in range(3):
        engine.step()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("mlxinfer.engine.core.image_encoder.mx.eval", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert sequence.finish_reason == "cancelled"
    assert engine.idle
    nothing_left(engine)
    assert run(engine, [case_request("two")]) == [cases()["two"].greedy]
