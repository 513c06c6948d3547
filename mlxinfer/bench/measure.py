"""Measures an engine with prompts of random tokens and answers of a fixed length, on the path of every request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter

import numpy as np

from ..cache.pool import PageDemand
from ..engine.core.engine import Engine
from ..engine.core.sequence import Sequence
from ..engine.llm import LLM
from ..types import SamplingParams
from .machine import Machine
from .roofline import Cost, footprint

Tell = Callable[[str], None]

_GREEDY = SamplingParams(temperature=0.0)
_WARM_PROMPT, _WARM_STEPS = 32, 2
_LEAST_STEPS = 4


class Bench:
    """Times an engine that has no other user. It is unusable after an exception."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._random = np.random.default_rng(0)

    def prefill(self, tokens: int) -> float:
        """Seconds from a prompt of `tokens` tokens to the first token of its answer."""
        sequence = self._sequence(tokens, tokens + 1)
        start = perf_counter()
        self.engine.add(sequence)
        self._advance([sequence], 1)
        return sequence.times.first_token - start

    def fits(self, depth: int, streams: int, steps: int) -> bool:
        """True if `filled` has room. Each sequence is measured on a copy, which shares nothing in the worst case."""
        limit = _limit(depth, steps)
        return self.engine.cache.room([PageDemand(None, 0, limit)] * (2 * streams))

    @contextmanager
    def filled(self, depth: int, streams: int, steps: int) -> Iterator[list[Sequence]]:
        """Sequences with `depth` (at least one) cached tokens each, for `decode` of up to `steps` tokens."""
        held = [self._hold(self._sequence(max(depth, 1), _limit(depth, steps))) for _ in range(streams)]
        yield held
        self._end(held)

    def decode(self, held: list[Sequence], steps: int) -> float:
        """Seconds for `steps` tokens of each sequence, all together. The sequences stay unchanged."""
        running = [self._copy(sequence) for sequence in held]
        for sequence in running:
            self.engine.scheduler.run(sequence)
        self._advance(running, _WARM_STEPS)
        start = perf_counter()
        self._advance(running, steps)
        seconds = perf_counter() - start
        self._end(running)
        return seconds

    def _sequence(self, tokens: int, limit: int) -> Sequence:
        vocabulary = self.engine.model.vocab_size
        return Sequence(self._random.integers(0, vocabulary, tokens).tolist(), _GREEDY, seed=0, max_length=limit)

    def _hold(self, sequence: Sequence) -> Sequence:
        """Compute its known tokens, and take it off the schedule while they stay in the cache."""
        self.engine.add(sequence)
        self._advance([sequence], 1)
        self.engine.scheduler.remove(sequence)
        self._drain()
        return sequence

    def _copy(self, held: Sequence) -> Sequence:
        """A copy to continue from; recomputed if the model's cache cannot fork."""
        copy = Sequence(list(held.tokens), _GREEDY, seed=0, max_length=held.max_length)
        if not self.engine.cache.can_fork:
            return self._hold(copy)
        assert held.slot is not None
        copy.attach_fork(held, self.engine.cache.fork(held.slot))
        return copy

    def _advance(self, sequences: list[Sequence], count: int) -> None:
        """Run until all have `count` more tokens."""
        targets = [len(s.tokens) + count for s in sequences]
        while any(len(s.tokens) < target for s, target in zip(sequences, targets, strict=True)):
            self.engine.step()

    def _drain(self) -> None:
        while not self.engine.idle:
            self.engine.step()

    def _end(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self.engine.abort(sequence)
        self._drain()


def _limit(depth: int, steps: int) -> int:
    """Maximum length of a sequence that is measured at this depth."""
    return max(depth, 1) + steps + 4 * _WARM_STEPS


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Settings of a measurement."""

    prefill: tuple[int, ...] = (128, 512)
    """Lengths of prompts; a row for each."""
    depths: tuple[int, ...] = (0, 1024)
    """Tokens in the cache of each sequence before decoding; a row for each depth and batch."""
    batches: tuple[int, ...] = (1, 4, 8)
    """Numbers of sequences that are decoded together."""
    repeat: int = 5
    """Samples of a row."""
    steps: int = 64
    """Most tokens per sequence in a sample of decoding."""
    max_seconds: float = 60.0
    """A row is skipped if one sample would take longer, and has fewer samples if all together would; 0: no limit."""


@dataclass(frozen=True, slots=True)
class Shares:
    """A speed relative to the machine: 1 is the speed of a plain read of the same bytes, or of a large matrix product with as many
    multiply-adds."""

    bandwidth: float
    """Relative to a plain read."""
    operations: float
    """Relative to a large product."""
    limit: str
    """"memory" or "arithmetic"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Speeds of one row."""

    work: str
    """"prefill" or "decode"."""
    tokens: int
    """Tokens of the prompt, or tokens per sequence in a sample of decoding."""
    depth: int
    """Cached tokens of each sequence before."""
    batch: int
    """Number of sequences."""
    rates: tuple[float, ...] = ()
    """Tokens per second of all sequences together, one for each sample."""
    cost: Cost | None = None
    """Cost of a decode step in the middle of a sample, or of a whole prompt; None if the model's sizes are unknown."""
    left_out: str | None = None
    """Reason why it was not measured; None if it was."""

    @property
    def rate(self) -> float:
        """Tokens per second, the median."""
        return median(self.rates)

    @property
    def seconds(self) -> float:
        """Seconds of the work in `cost`."""
        return (self.batch if self.work == "decode" else self.tokens) / self.rate

    @property
    def name(self) -> str:
        """Such as "prefill 512" or "decode 1024 x8"."""
        return f"prefill {self.tokens}" if self.work == "prefill" else f"decode {self.depth} x{self.batch}"

    def against(self, machine: Machine) -> Shares | None:
        """Speed relative to a machine; None without a measurement or a cost."""
        if not self.rates or self.cost is None:
            return None
        reading, computing = self.cost.bytes / machine.read_bytes, self.cost.operations / machine.operations
        return Shares(reading / self.seconds, computing / self.seconds, "memory" if reading > computing else "arithmetic")


def measure(llm: LLM, plan: Workload, tell: Tell) -> Iterator[Measurement]:
    """Yield the rows of a plan. `tell` is called with a line about the current measurement."""
    engine, sizes = llm.engine, footprint(llm.engine.model, llm.config, llm.dtype, llm.kv)
    bench = Bench(engine)
    tell("warming up")
    warm = max(min(_WARM_PROMPT, engine.config.max_context - 1), 1)
    bench.prefill(warm)
    speed = warm / bench.prefill(warm)
    for tokens in plan.prefill:
        row = _prefill_row(bench, plan, tokens, speed, tell)
        speed = row.rate if row.rates else speed
        yield replace(row, cost=sizes.prefill(tokens, engine.config.max_num_batched_tokens) if sizes else None)
    for depth in plan.depths:
        for row in _decode_rows(bench, plan, depth, speed, tell):
            yield replace(row, cost=sizes.decode(depth + row.tokens // 2, row.batch) if sizes else None)


def _prefill_row(bench: Bench, plan: Workload, tokens: int, speed: float, tell: Tell) -> Measurement:
    row = Measurement(work="prefill", tokens=tokens, depth=0, batch=1)
    reason = _too_long(plan, tokens / speed)
    if tokens >= bench.engine.config.max_context:
        reason = _beyond(bench)
    if reason:
        return replace(row, left_out=reason)
    times = _samples(plan, row.name, lambda: bench.prefill(tokens), tell)
    return replace(row, rates=tuple(tokens / t for t in times))


def _decode_rows(bench: Bench, plan: Workload, depth: int, speed: float, tell: Tell) -> Iterator[Measurement]:
    """All batches at one depth. The cache is filled once, for the largest batch."""
    reasons = {batch: _obstacle(bench, plan, depth, batch, speed) for batch in plan.batches}
    rows = [Measurement(work="decode", tokens=0, depth=depth, batch=batch, left_out=reason) for batch, reason in reasons.items()]
    streams = max((row.batch for row in rows if not row.left_out), default=0)
    if not streams:
        yield from rows
        return
    tell(f"filling the cache with {streams} x {depth} tokens")
    with bench.filled(depth, streams, plan.steps) as held:
        for row in rows:
            yield row if row.left_out else _decode_row(bench, plan, row, held[: row.batch], tell)


def _obstacle(bench: Bench, plan: Workload, depth: int, batch: int, speed: float) -> str | None:
    config = bench.engine.config
    if _limit(depth, plan.steps) > config.max_context:
        return _beyond(bench)
    if batch > config.max_num_seqs:
        return f"at most {config.max_num_seqs} sequences run together"
    if not bench.fits(depth, batch, plan.steps):
        return "does not fit in the cache's memory"
    return _too_long(plan, depth * batch / speed, "to fill the cache")


def _decode_row(bench: Bench, plan: Workload, row: Measurement, held: list[Sequence], tell: Tell) -> Measurement:
    tell(row.name)
    step = bench.decode(held, _WARM_STEPS) / _WARM_STEPS
    affordable = int(plan.max_seconds / plan.repeat / step) if plan.max_seconds else plan.steps
    steps = min(plan.steps, max(affordable, _LEAST_STEPS))
    times = _samples(plan, row.name, lambda: bench.decode(held, steps), tell)
    return replace(row, tokens=steps, rates=tuple(steps * row.batch / t for t in times))


def _samples(plan: Workload, name: str, once: Callable[[], float], tell: Tell) -> list[float]:
    """`repeat` times in seconds, or as many as `max_seconds` allows."""
    times: list[float] = []
    while len(times) < plan.repeat and (not times or not _too_long(plan, sum(times) + times[-1])):
        tell(f"{name}: {len(times) + 1} of {plan.repeat}")
        times.append(once())
    return times


def _beyond(bench: Bench) -> str:
    return f"does not fit in the context of {bench.engine.config.max_context} tokens"


def _too_long(plan: Workload, seconds: float, purpose: str = "") -> str | None:
    if not plan.max_seconds or seconds <= plan.max_seconds:
        return None
    return f"takes about {seconds:.0f} s {purpose}".rstrip()
