"""Allocates and frees the cache slots of sequences, and shares cached prefixes between them."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

from ...cache.base import PAGE
from ...cache.paged import PagedCache
from ...cache.pool import PageDemand
from .chunk_policy import ChunkPolicy
from .rope_regime import RopeRegime
from .scheduler import Allocation, Scheduler
from .sequence import Sequence

if TYPE_CHECKING:
    from .image_encoder import ImageEncoder


class KVCacheManager:
    """Connects the scheduler, which chooses the next sequence, with the cache, which knows the free pages."""

    def __init__(
        self,
        cache: PagedCache,
        scheduler: Scheduler,
        rope: RopeRegime,
        chunks: ChunkPolicy,
        *,
        prefix_cache: bool,
        encoder: ImageEncoder | None = None,
    ) -> None:
        """`prefix_cache`: sequences with the same prefix share its pages. `encoder` is told which images admitted sequences need."""
        self._cache = cache
        self._scheduler = scheduler
        self._rope = rope
        self._chunks = chunks
        self._prefix_cache = prefix_cache
        self._encoder = encoder
        self.leaders: list[Sequence] = []
        """Sequences from which other samples have yet to fork."""
        self.restarts = rope.boundary is not None
        """True if sequences may have to be computed again (`must_restart`)."""
        self._between_steps = True

    def admit(self, *, between_steps: bool) -> None:
        """Admit waiting sequences in order while there is room. `between_steps`: no step is pending."""
        self._between_steps = between_steps
        if self.restarts:
            for sequence in filter(self.must_restart, self._scheduler.running):
                self._restart(sequence)
        self._fork_all()
        if self._scheduler.admit(self.allocate):
            self._fork_all()  # a whole prompt may be cached already

    def allocate(self, sequence: Sequence) -> Allocation:
        """Give a sequence its slot, with the cached prefix of its tokens."""
        salt, keys = self._cache_salt(sequence), sequence.keys()
        if salt is not None:
            store, self._between_steps = self._between_steps, False  # once, because it takes time
            if self._cache.prefetch(keys, salt, store=store):
                return Allocation.LOADING
        match = None if salt is None else self._cache.find(keys, salt, sequence.images.spans if sequence.images else ())
        reused = match.reused if match else 0
        if self._scheduler.running and not self._has_room(PageDemand(None, reused, len(sequence.tokens) - reused + PAGE, match)):
            return Allocation.NO_ROOM
        sequence.attach(self._cache.open(match, salt), reused, match.note if match else "")
        self._want_images(sequence)
        if sequence.samples_to_fork:
            self.leaders.append(sequence)
        return Allocation.DONE

    def free(self, sequence: Sequence) -> None:
        """Free the slot, which no pending step may use. Its pages stay cached while there is room."""
        assert sequence.slot is not None
        self.cache_prefix(sequence)
        self._cache.release(sequence.slot)
        sequence.detach()
        if sequence in self.leaders:
            self.leaders.remove(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Free the pages of a sequence for others. It waits again, and later recomputes tokens that are not cached any more."""
        self.free(sequence)
        sequence.preempt()
        self._scheduler.requeue(sequence)

    def cache_prefix(self, sequence: Sequence) -> None:
        """Cache the computed tokens of a sequence for others with the same prefix, its partial last page included."""
        if sequence.slot is not None and self._chunks.snapshots and self._cache_salt(sequence) is not None:
            self._cache.keep(sequence.slot, sequence.keys()[: sequence.num_computed_tokens])

    def must_restart(self, sequence: Sequence) -> bool:
        """True if a running sequence must be computed again, because its length has changed its rope."""
        return self._rope.must_restart(sequence)

    def _restart(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self._cache.release(sequence.slot)
        sequence.restart()
        sequence.attach(self._cache.open(None, self._cache_salt(sequence)))
        self._want_images(sequence)

    def _want_images(self, sequence: Sequence) -> None:
        if self._encoder is not None and sequence.images is not None:
            self._encoder.begin(sequence)

    def _has_room(self, newcomer: PageDemand) -> bool:
        """True if it fits with one more page for every running sequence, so that none is preempted at once."""
        running = self._scheduler.running
        return self._cache.room([*(PageDemand(s.slot, s.num_computed_tokens, s.remaining + PAGE) for s in running), newcomer])

    def _cache_salt(self, sequence: Sequence) -> str | None:
        """Everything that its keys and values depend on besides its tokens; None if they are not shared."""
        whole = sequence.wants_logits or (sequence.pooling is not None and not sequence.pooling.may_skip)
        shared = self._prefix_cache and not whole and sequence.hooks is None
        salt = self._rope.cache_salt(sequence) if shared else None
        if salt is not None and sequence.adapter is not None:
            salt = f"{salt} adapter {sequence.adapter.digest}"
        if salt is not None and sequence.cache_salt:  # a digest: it may be a secret, and KV events contain salts
            salt = f"{salt} of {blake2b(sequence.cache_salt.encode(errors='surrogatepass'), digest_size=16).hexdigest()}"
        return salt

    def _fork_all(self) -> None:
        for leader in list(self.leaders):
            if leader.num_computed_tokens == leader.fork_point:
                self._fork(leader)

    def _fork(self, leader: Sequence) -> None:
        """Let the samples of a leader continue from its computed tokens; those without room wait."""
        assert leader.slot is not None
        for sample in reversed(leader.samples_to_fork):
            if sample.finish_reason:  # ended during the chunk before the fork
                continue
            fits = self._has_room(PageDemand(leader.slot, leader.num_computed_tokens, 1 + PAGE))
            if len(self._scheduler.running) >= self._scheduler.max_num_seqs or not fits:
                self._scheduler.requeue(sample)
                continue
            sample.attach_fork(leader, self._cache.fork(leader.slot))
            self._want_images(sample)
            self._scheduler.run(sample)
        leader.lead([])
        self.leaders.remove(leader)
