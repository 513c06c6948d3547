"""Which sequences have a slot in the cache: they get it with what is known of their beginning, and give it back."""

from __future__ import annotations

from time import perf_counter

from ..cache.base import PAGE
from ..cache.paged import PagedCache
from ..cache.pool import PageDemand
from ..config import EngineConfig
from ..models.decoder import Model
from .scheduler import Scheduler
from .sequence import Sequence
from .spec_decode.proposer import Proposer


class KVCacheManager:
    """Between the scheduler, which knows who is next, and the cache, which knows what there is room for."""

    def __init__(self, model: Model, config: EngineConfig, cache: PagedCache, scheduler: Scheduler, speculator: Proposer) -> None:
        self._model = model
        self._config = config
        self._cache = cache
        self._scheduler = scheduler
        self._speculator = speculator
        self._flying = False

    def admit(self, *, flying: bool) -> None:
        """Let those begin who are first in line, as far as there is room. `flying`: a step has not landed yet."""
        self._flying = flying
        for sequence in filter(self.outgrown, self._scheduler.running):
            self._restart(sequence)
        self._fork_all()
        if self._scheduler.admit(self._open):
            self._fork_all()  # all of a prompt may be cached already

    def preempt(self, sequence: Sequence) -> None:
        """Its pages go to others, or are kept as long as nobody needs them. It comes back and recomputes what is gone by then."""
        self.release(sequence)
        sequence.pending_token, sequence.num_computed_tokens = None, 0
        sequence.drafts = []
        sequence.preemptions += 1
        self._scheduler.requeue(sequence)

    def release(self, sequence: Sequence) -> None:
        """No step in flight uses what it holds."""
        assert sequence.slot is not None
        self.keep(sequence)
        self._cache.release(sequence.slot)
        sequence.slot = None
        self._speculator.forget(sequence)

    def keep(self, sequence: Sequence) -> None:
        """Remember where a sequence stands, for those that begin alike."""
        if sequence.slot is not None and self._cache_key(sequence) is not None and not self._config.deterministic:
            self._cache.keep(sequence.slot, sequence.tokens[: sequence.num_computed_tokens])

    def outgrown(self, sequence: Sequence) -> bool:
        """Whether the sequence has crossed the length at which the model rotates every position differently (longrope)."""
        boundary = self._model.recompute_at
        return boundary is not None and sequence.total <= boundary < sequence.num_tokens and sequence.remaining > 0

    def _open(self, sequence: Sequence) -> bool | None:
        """Give a sequence its slot, with whatever of its tokens is cached already. False if there is no room beside the others, None while
        the disk is being read."""
        key = self._cache_key(sequence)
        if key is not None and self._cache.prefetch(sequence.tokens, key, store=not self._flying):
            return None
        match = None if key is None else self._cache.find(sequence.tokens, key)
        reused = match.reused if match else 0
        if self._scheduler.running and not self._room_for(PageDemand(None, reused, len(sequence.tokens) - reused + PAGE, match)):
            return False
        sequence.slot, sequence.num_computed_tokens = self._cache.open(match, key), reused
        if not sequence.preemptions:
            sequence.reused, sequence.miss = reused, match.note if match else ""
            sequence.times.started = perf_counter()
        return True

    def _room_for(self, newcomer: PageDemand) -> bool:
        """Whether it can run beside the others for a while: a page more for each, so that nobody has to leave at once."""
        running = self._scheduler.running
        return self._cache.room([*(PageDemand(s.slot, s.num_computed_tokens, s.remaining + PAGE) for s in running), newcomer])

    def _cache_key(self, sequence: Sequence) -> str | None:
        """What else its keys and values depend on, beside its tokens; None if they are not to be shared."""
        if not self._config.prefix_cache or sequence.no_chunked_recompute or sequence.wants_logits:
            return None
        rotation = self._model.rotation(sequence.total)
        return f"{sequence.cache_salt} {rotation}" if any(rotation) else sequence.cache_salt

    def _restart(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self._cache.release(sequence.slot)
        sequence.total = sequence.num_tokens
        sequence.slot = self._cache.open(None, self._cache_key(sequence))
        sequence.num_computed_tokens, sequence.pending_token = 0, None

    def _fork_all(self) -> None:
        for leader in list(self._scheduler.running):
            if leader.samples_to_fork and leader.num_computed_tokens == leader.fork_point:
                self._fork(leader)

    def _fork(self, leader: Sequence) -> None:
        """Followers take the leader's past and run from here on; they wait where there is no room for all of them."""
        assert leader.slot is not None
        for follower in reversed(leader.samples_to_fork):
            fits = self._room_for(PageDemand(leader.slot, leader.num_computed_tokens, 1 + PAGE))
            if len(self._scheduler.running) >= self._config.max_sequences or not fits:
                self._scheduler.requeue(follower)
                continue
            follower.slot = self._cache.fork(leader.slot)
            follower.num_computed_tokens = follower.reused = leader.num_computed_tokens
            follower.times.started = leader.times.started
            self._scheduler.run(follower)
        leader.samples_to_fork = []
