"""The protocol of draft models and heads."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ...cache.paged import PagedCache
    from ..core.sequence import Sequence


class TokenDrafter(Protocol):
    """Drafts for many sequences at once: a draft model, or a head that reads the model's hidden states."""

    cost: float
    """Estimated time of one turn (a draft of each sequence), relative to a step of the target model; used until it is measured."""
    cache: PagedCache
    """Cache of its layers."""

    def room(self, sequence: Sequence) -> int:
        """Return the number of drafts possible now for a sequence, up to the end of a page."""
        ...

    def catch_up(self, sequences: Many[Sequence]) -> None:
        """Compute missing tokens of answering sequences, if it has its own cache."""
        ...

    def propose(self, wanted: Many[tuple[Sequence, int]]) -> None:
        """Set this many drafts of each sequence, as arrays on the device. The host has read the sequences' last tokens."""
        ...

    def verified(self, sequence: Sequence, accepted: int) -> None:
        """Note that the first `accepted` of its drafts were accepted."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """Note that the sequence has no slot any more."""
        ...
