"""Where a reading of texts has come to, kept in the journal: an interrupted one goes on there."""

from __future__ import annotations

import mlx.core as mx

from ..write.journal import Journal


class JournalBookmarks:
    """Implements `stream.Bookmarks`."""

    def __init__(self, journal: Journal, name: str, found: dict[str, mx.array] | None = None) -> None:
        """`name` tells this reading from others. `found`, by name, is what the reading has found so far: kept with the states, and filled
        by `load`."""
        self._journal, self._name, self._last = journal, name, 0
        self._found = {} if found is None else found

    def load(self) -> tuple[int, list[mx.array]] | None:
        place = self._journal.done(self._name)
        kept = self._journal.load(self._unit(int(place["parts"]))) if place else None
        if kept is None or place is None:
            return None
        self._last = int(place["parts"])
        self._found.clear()
        self._found.update({name[1:]: array for name, array in kept[0].items() if name.startswith("/")})
        return self._last, [kept[0][str(number)] for number in range(len(kept[0]) - len(self._found))]

    def save(self, parts: int, states: list[mx.array]) -> None:
        found = {f"/{name}": array for name, array in self._found.items()}
        self._journal.save(self._unit(parts), {str(number): state for number, state in enumerate(states)} | found)
        self._journal.record(self._name, {"parts": parts})
        self.forget()
        self._last = parts

    def forget(self) -> None:
        """Delete what was saved last."""
        self._journal.forget(self._unit(self._last))

    def _unit(self, parts: int) -> str:
        return f"{self._name} {parts}"
