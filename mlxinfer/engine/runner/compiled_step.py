"""Decoding without building each step's graph in Python: `mx.compile` traces a step once, and MLX replays it for later steps.

Only the usual step is replayed, in which every sequence advances by one token and fills no page. Steps differ in arrays only: tokens,
plans, cosines, and arrays of the cache. Each combination of their shapes is traced when it occurs for the second time. The first steps
are also built, and compared (`replay_check`).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import count
from threading import get_ident

import mlx.core as mx

from ...cache.base import Rotation
from ...cache.paged import PagedCache
from ...cache.replayable_step import SteadyCache, SteadyStep
from ...cache.step import CacheStep
from ...errors import one_line
from ...kernels_metal import executors
from ...kernels_metal.kernel_trial import age
from ...models.decoder import Decoder, Model
from ...nn.attention import Temperature
from ...nn.mrope import ShiftedRotation
from ...util.dataclass import dataclass
from .replay_check import ReplayCheck, compare

_MOST_TRACES, _MOST_SEEN = 32, 256
_UNREAD = 1
"""Comparisons that may still run when a step is built: that of the pending step."""

_Compute = Callable[[mx.array, "list[mx.array]", "list[mx.array]", SteadyStep, CacheStep], "list[mx.array]"]
"""From tokens, arrays of the host and arrays of the cache to scores and the cache's new arrays."""
_numbers = count()

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Trace:
    """A step that MLX can replay."""

    compute: _Compute
    passed: int = 0
    """Steps that were equal to built ones."""


class CompiledSteps:
    """The traces of one model over one cache."""

    def __init__(self, model: Decoder, cache: PagedCache, check: ReplayCheck | None = None) -> None:
        """`check` decides which steps are replayed; None: all that can be."""
        self._model = model
        self._cache = SteadyCache(cache)
        self._check = check
        self._checked: tuple[_Trace, mx.array] | None = None
        """A trace and its scores of the step that is being built."""
        self._unread: deque[tuple[_Trace, mx.array]] = deque()
        """Comparisons whose results were not read yet."""
        self._traces: dict[Hashable, _Trace] = {}
        self._seen: set[Hashable] = set()
        self._temperatures = list(_temperatures(model))
        self._age = age()
        self.traced = 0
        """Number of traces by MLX."""
        self.replayed = 0
        """Steps computed only by a trace, including those that created it."""
        self.checked = 0
        """Steps computed by a trace and built."""

    @classmethod
    def of(cls, model: Model, cache: PagedCache, check: ReplayCheck | None = None) -> CompiledSteps | None:
        """Create the traces of a model that uses kernels; None if no step can be replayed."""
        # A draft head reads the rows of every step, and other machines are notified of every step.
        if not isinstance(model, Decoder) or model.mtp is not None or model.divided or not executors.traceable():
            return None
        found = cls(model, cache, check)
        return found if found._cache.possible else None

    def scores(self, tokens: mx.array, step: CacheStep) -> mx.array | None:
        """Scores `[T, vocab]` of int32 tokens `[T]`, by a trace that also updates the cache. None if the step must be built in Python,
        followed by `built`; nothing has changed then."""
        self._checked = None
        if not self._cache.possible or not self._may_replay():
            return None
        steady = self._cache.steady(step)
        if steady is None:
            return None
        rotations = self._model.rotations(step)
        waves = [rotation.waves for rotation in rotations.values()]
        shifted = _shifted(rotations)
        given = [*steady.given, step.positions, *(rotation.offsets for rotation in shifted), *waves]
        trace = self._trace_of(self._key(steady, step, tokens, len(shifted)))
        if trace is None:
            return None
        try:
            outputs = trace.compute(tokens, given, steady.begin(), steady, step)
        except (RuntimeError, ValueError, LookupError, TypeError) as error:  # the step can be built in Python
            self._stop()
            name = self._check.name if self._check else "this model"
            _log.warning("steps of %s are built in Python: MLX cannot replay them (%s)", name, one_line(error))
            return None
        if self._check is not None and not self._check.trusts(trace.passed):
            self._checked = trace, outputs[0]
            return None
        self.replayed += 1
        steady.end(outputs[1:])
        step.replayed(outputs[1:])
        return outputs[0]

    def built(self, step: CacheStep, scores: Sequence[mx.array]) -> list[mx.array]:
        """Learn from a step that was built in Python. Returns arrays to evaluate with it: the comparison with its trace."""
        self._cache.learn(step)
        checked, self._checked = self._checked, None
        if checked is None:
            return []
        trace, replayed = checked
        self.checked += 1
        result = compare(scores[0], replayed)
        self._unread.append((trace, result))
        return [result]

    def _may_replay(self) -> bool:
        """Read the comparisons of collected steps. Return False once one of this process was wrong."""
        if self._check is None:
            return True
        while len(self._unread) > _UNREAD:
            trace, result = self._unread.popleft()
            trace.passed += self._check.learn(result)
        if not self._check.allowed:
            self._stop()
        return self._check.allowed

    def _stop(self) -> None:
        """Build all steps from now on."""
        self._cache.possible = False
        self._traces.clear()
        self._unread.clear()

    def _key(self, steady: SteadyStep, step: CacheStep, tokens: mx.array, shifted: int) -> Hashable:
        """Everything that a trace depends on besides arrays. Traces belong to threads."""
        segments = step.segments
        regimes = [tuple([rope.regime(max(s.total, s.past + 1)) for s in segments]) for rope in self._model.ropes.values()]
        hot = tuple([each.beyond(segments) for each in self._temperatures])
        return steady.key, tuple(regimes), hot, shifted, tokens.dtype, age(), get_ident()

    def _trace_of(self, key: Hashable) -> _Trace | None:
        """The trace of a key; None if the key is new. The least recently used trace is dropped if there are too many."""
        if self._age != age():  # other kernels are used: old keys never occur again
            self._age = age()
            self._traces.clear()
        trace = self._traces.pop(key, None)
        if trace is None:
            if key not in self._seen:
                if len(self._seen) >= _MOST_SEEN:
                    self._seen.clear()
                self._seen.add(key)
                return None
            if len(self._traces) >= _MOST_TRACES:
                self._traces.pop(next(iter(self._traces)))
            trace = _Trace(_compute(self._model, self._count))
        self._traces[key] = trace
        return trace

    def _count(self) -> None:
        self.traced += 1


def _compute(model: Decoder, traced: Callable[[], None]) -> _Compute:
    """A step as a function of arrays. MLX traces it at the first call, which also calls `traced`. Another trace would use the current step.
    A unique number keeps MLX from mistaking it for an earlier function at the same address."""
    current: list[tuple[SteadyStep, CacheStep]] = []
    number = next(_numbers)

    def compute(_: int, tokens: mx.array, given: Sequence[mx.array], held: Sequence[mx.array]) -> list[mx.array]:
        ((steady, step),) = current
        traced()
        rotations = model.rotations(step)
        shifted = _shifted(rotations)
        first = len(given) - len(rotations)
        own = first - len(shifted)
        positions, step.positions = step.positions, given[own - 1]
        for turned, offsets in zip(shifted, given[own:first], strict=True):
            turned.__dict__["offsets"] = offsets
        for rotation, waves in zip(rotations.values(), given[first:], strict=True):
            rotation.__dict__["waves"] = waves
        try:
            with steady.reading(given[: own - 1], held):
                scores = model.scores(model.hidden(tokens, step, rotations=rotations))
                return [scores, *steady.left()]
        finally:
            step.positions = positions

    compiled: Callable[..., list[mx.array]] = mx.compile(compute)

    def call(tokens: mx.array, given: list[mx.array], held: list[mx.array], steady: SteadyStep, step: CacheStep) -> list[mx.array]:
        current.append((steady, step))
        try:
            return compiled(number, tokens, given, held)
        finally:
            current.clear()

    return call


def _shifted(rotations: Mapping[str, Rotation]) -> list[ShiftedRotation]:
    """Return the rotations whose positions are not indices."""
    return [rotation for rotation in rotations.values() if isinstance(rotation, ShiftedRotation)]


def _temperatures(model: Decoder) -> set[Temperature]:
    mixers = [getattr(block, "mixer", None) for block in model.blocks]
    return {each for mixer in mixers if (each := getattr(mixer, "temperature", None)) is not None}
