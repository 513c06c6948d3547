"""Draft models: small models with the vocabulary of the target model."""

from __future__ import annotations

from collections.abc import Sequence as Many

import mlx.core as mx

from ...cache.base import PAGE, AttentionSpec, Segment
from ...cache.kv_format import KVFormat
from ...cache.paged import PagedCache
from ...cache.pool import PageDemand
from ...cache.step import CacheStep
from ...config import EngineConfig
from ...errors import DraftError
from ...loading.load import LoadedModel
from ...models.decoder import Model
from ...sampling import SamplingBatch
from ...tokenizer.tokenizer import Tokenizer
from ...util.dataclass import dataclass
from ..core.sequence import Sequence

_BEHIND = 32
"""Most missing tokens that are computed together with the first draft; more are computed before it."""


def check_draft(model: Model, draft: Tokenizer, target: Tokenizer) -> None:
    """Raise `DraftError` if a model, loaded or only outlined, cannot draft for another. `draft` and `target`: their tokenizers."""
    check_kind(model)
    check_vocabulary(target, draft)


def check_vocabulary(target: Tokenizer, draft: Tokenizer) -> None:
    """Raise `DraftError` if a token id differs in meaning between the two."""
    if not target.vocab_size or not draft.vocab_size:
        raise DraftError("a draft model needs the tokenizers of both models, to compare them: one of them has none")
    if target.vocab_size != draft.vocab_size:
        raise DraftError(f"the draft model has {draft.vocab_size} tokens, the model {target.vocab_size}: it needs the same vocabulary")
    for i in range(target.vocab_size):
        ours, theirs = target.token_bytes(i), draft.token_bytes(i)
        if ours != theirs:
            raise DraftError(f"the draft model needs the same vocabulary: its token {i} is {theirs!r}, the model's is {ours!r}")
    if target.eos_token_ids != draft.eos_token_ids:
        ends = [", ".join(map(str, sorted(t.eos_token_ids))) or "none" for t in (draft, target)]
        raise DraftError(f"the draft model ends answers with other tokens: {ends[0]} instead of {ends[1]}")


@dataclass(frozen=True, slots=True)
class Drafter:
    """A loaded draft model, from which an engine creates a `DraftModel` at every start."""

    model: Model
    dtype: mx.Dtype
    """Of its keys and values."""
    cost: float
    """Time of its step relative to a step of the target model."""
    kv: KVFormat | None = None
    """Format of its full pages; None: 16 bits."""
    fingerprint: str = ""
    """Identifies its weights."""

    @staticmethod
    def of(target: LoadedModel, draft: LoadedModel, kv: KVFormat | None = None) -> Drafter:
        """Wrap a draft model that has passed `check_draft`."""
        return Drafter(draft.model, draft.dtype, min(draft.weight_bytes / max(target.weight_bytes, 1), 1.0), kv, str(draft.path))

    def start(self, config: EngineConfig, vocab_size: int) -> DraftModel:
        """The model with an empty cache. `vocab_size`: of the target model."""
        cache = PagedCache(
            self.model.layers,
            dtype=self.dtype,
            kv_cache_tokens=config.kv_cache_tokens,
            chunk=config.max_num_batched_tokens,
            kv=self.kv,
            fingerprint=self.fingerprint,
            prefix_cache_tokens=config.prefix_cache_tokens if config.prefix_cache else 0,
            snapshot_bytes=config.snapshot_bytes // 4 if config.prefix_cache else 0,
        )
        return DraftModel(self.model, cache, vocab_size=vocab_size, max_num_batched_tokens=config.max_num_batched_tokens, cost=self.cost)


def check_kind(model: Model) -> None:
    """Raise `DraftError` for a model whose states cannot be rolled back."""
    if not all(isinstance(spec, AttentionSpec) for spec in model.layers):
        raise DraftError(f"{model.model_type} cannot draft: its layers keep states, from which wrong drafts cannot be taken back")


@dataclass(slots=True)
class _Place:
    """A sequence in the draft model's cache."""

    slot: int
    computed: int
    """Computed tokens."""
    base: int = 0
    """Known tokens at its last drafts."""
    draft_count: int = 0
    """Drafts that are not verified yet."""


class DraftModel:
    """Implements `TokenDrafter`, with its own cache. It samples with each sequence's parameters, seed and positions. Where its
    probabilities equal the target's, it chooses the same tokens, at any temperature."""

    def __init__(self, model: Model, cache: PagedCache, *, vocab_size: int, max_num_batched_tokens: int, cost: float = 0.3) -> None:
        """`vocab_size`: of the target model, which may have rows beyond its last token. `cache` needs the capacity of the target's, in
        tokens. `cost`: of a step, relative to the target's."""
        check_kind(model)
        self.cost = cost
        self.model = model
        self.cache = cache
        self.vocab_size = vocab_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self._places: dict[Sequence, _Place] = {}
        self._unsealed: tuple[CacheStep, dict[int, Many[int]]] | None = None

    def room(self, sequence: Sequence) -> int:
        """Drafts possible now for a sequence, up to the end of a page; 0 until its tokens are computed."""
        place, known = self._places.get(sequence), len(sequence.tokens)
        if place is None:
            return 0
        # Its drafts may not have been used: then the last known token is computed again, to draft after it.
        place.computed = min(place.computed, known - 1)
        if known - place.computed > _BEHIND or known // PAGE != place.computed // PAGE:
            return 0
        return max(min(PAGE - known % PAGE, self.model.max_context - known), 0)

    def catch_up(self, sequences: Many[Sequence]) -> None:
        """Compute missing tokens of answering sequences, without the last one, as many as fit in a step."""
        segments: list[Segment] = []
        tokens: list[int] = []
        growth: list[PageDemand] = []
        self._seal()
        for s in sequences:
            if s.slot is None or not s.remaining or s.is_only_read or s.images is not None:  # a draft model sees no images
                continue
            end = min(len(s.tokens) - 1, self.model.max_context)
            place = self._places.get(s) or self._open(s)
            behind = end - place.computed
            due = behind >= _BEHIND or (behind > 0 and len(s.tokens) // PAGE != place.computed // PAGE)
            count = min(behind, self.max_num_batched_tokens - len(tokens)) if due else 0
            growth = [*growth, PageDemand(place.slot, place.computed, count)] if count else growth
            # Pages shared in the target's cache may exist here more than once: a sequence without room continues without drafts.
            if count and self.cache.room(growth):
                segments.append(Segment(place.slot, len(tokens), count, place.computed, max(s.rope_length, end)))
                tokens += s.tokens[place.computed : place.computed + count]
                place.computed += count
        if not segments:
            return
        step = self._begin(segments)
        hidden = self.model.hidden(mx.array(tokens, dtype=mx.int32), step)
        mx.async_eval(step.state, hidden)  # type: ignore[no-untyped-call]
        if step.needs_commit:
            slots = {p.slot: s.tokens for s, p in self._places.items()}
            self._unsealed = step, {g.slot: slots[g.slot] for g in segments}

    def propose(self, wanted: Many[tuple[Sequence, int]]) -> None:
        """Set this many drafts of each sequence, as arrays on the device. The host has read the sequences' last tokens."""
        wanted = sorted(wanted, key=lambda one: -one[1])
        drafts: list[list[mx.array]] = [[] for _ in wanted]
        batch: SamplingBatch | None = None
        for turn in range(wanted[0][1]):
            rows = [s for s, count in wanted if count > turn]
            logits = self._forward(rows, drafts)
            if batch is None or len(rows) < batch.size:
                batch = SamplingBatch(rows, self.vocab_size, drafts=drafts[: len(rows)])
            sampled = batch.sample(logits, [s.num_tokens + turn for s in rows])
            mx.async_eval(sampled.tokens)  # type: ignore[no-untyped-call]
            for i in range(len(rows)):
                drafts[i].append(sampled.tokens[i : i + 1])
        for (s, count), own in zip(wanted, drafts, strict=True):
            place = self._places[s]
            place.base, place.draft_count = s.num_tokens, count
            place.computed = s.num_tokens
            s.propose(own[0] if len(own) == 1 else mx.concatenate(own))

    def verified(self, sequence: Sequence, accepted: int) -> None:
        """Keep the computed tokens of the first `accepted` drafts. The last draft was never computed."""
        place = self._places.get(sequence)
        if place is not None and place.draft_count:
            place.computed = place.base + min(accepted, place.draft_count - 1)
            place.draft_count = 0

    def forget(self, sequence: Sequence) -> None:
        """Free its slot in the draft model's cache."""
        place = self._places.pop(sequence, None)
        if place is not None:
            self._seal()
            self.cache.keep(place.slot, sequence.tokens[: place.computed])
            self.cache.release(place.slot)

    def _open(self, sequence: Sequence) -> _Place:
        self._seal()
        match = self.cache.find(sequence.tokens)
        place = self._places[sequence] = _Place(self.cache.open(match), match.reused)
        return place

    def _forward(self, rows: Many[Sequence], drafts: Many[Many[mx.array]]) -> mx.array:
        """Logits `[R, vocab]` after the last draft of each sequence, or after its last token."""
        segments: list[Segment] = []
        pieces: list[mx.array] = []
        start = 0
        for s, own in zip(rows, drafts, strict=False):
            place = self._places[s]
            if own:
                past, new = s.num_tokens + len(own) - 1, own[-1].astype(mx.int32)
            else:
                past, new = place.computed, mx.array(s.tokens[place.computed :], dtype=mx.int32)
            count = new.shape[0]
            segments.append(Segment(place.slot, start, count, past, max(s.rope_length, past + count)))
            pieces.append(new)
            start += count
        step = self._begin(segments)
        hidden = self.model.hidden(pieces[0] if len(pieces) == 1 else mx.concatenate(pieces), step)
        if start > len(segments):
            hidden = hidden[mx.array([g.start + g.count - 1 for g in segments])]
        logits = self.model.logits(hidden)
        mx.async_eval(step.state, logits)  # type: ignore[no-untyped-call]
        missing = self.vocab_size - logits.shape[-1]
        return mx.pad(logits, [(0, 0), (0, missing)], constant_values=-mx.inf) if missing > 0 else logits[:, : self.vocab_size]

    def _begin(self, segments: list[Segment]) -> CacheStep:
        self._seal()
        return self.cache.begin(segments)

    def _seal(self) -> None:
        """Commit the last step if it filled pages."""
        if self._unsealed is not None:
            step, tokens = self._unsealed
            self._unsealed = None
            mx.eval(step.state)
            self.cache.commit(step, tokens)
