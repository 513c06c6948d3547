"""What proposes tokens besides the text itself."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ...cache.paged import PagedCache
    from ..core.sequence import Sequence


class TokenDrafter(Protocol):
    """Drafts for many sequences at once: a draft model, or a head that reads the model's hidden rows."""

    cost: float
    """Time of one of its turns, which make a draft of each sequence, in steps of the model it drafts for: a guess until it is measured."""
    cache: PagedCache
    """Where its layers keep their past."""

    def room(self, sequence: Sequence) -> int:
        """Drafts that can be made now for a sequence, up to a page's end."""
        ...

    def catch_up(self, sequences: Many[Sequence]) -> None:
        """Compute what is missing of those of these that answer, if it has a past of its own."""
        ...

    def propose(self, wanted: Many[tuple[Sequence, int]]) -> None:
        """Set this many drafts of each sequence, which only the device knows. The sequences' last tokens have been read."""
        ...

    def verified(self, sequence: Sequence, accepted: int) -> None:
        """The first `accepted` of its drafts hold."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """It has given its slot back."""
        ...
