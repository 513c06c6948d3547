"""Who has been served how much: the measure by which clients take turns."""

from __future__ import annotations

import heapq


class Service:
    """Tokens computed for each client, read and written ones alike, on a common scale.

    A client that joins starts at the least served of those that are active, or where it was when it left if that is more: being away
    earns no credit, and leaving for a moment pays no debt. These are the start tags of start-time fair queueing (Goyal, Vin and Cheng,
    SIGCOMM 1996), with tokens as the unit as in the virtual token counter (Sheng et al., OSDI 2024).
    """

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._active: dict[str, int] = {}
        self._least: list[tuple[float, str]] = []
        self._floor = 0.0

    def of(self, client: str) -> float:
        return self._served.get(client, 0.0)

    def join(self, client: str) -> None:
        """One more sequence of this client is waiting or running."""
        count = self._active.get(client, 0)
        if not count and self._active:
            self._floor = max(self._floor, self._least_active())
        self._active[client] = count + 1
        if count:
            return
        served = self._served[client] = max(self._served.get(client, 0.0), self._floor)
        heapq.heappush(self._least, (served, client))

    def leave(self, client: str) -> None:
        """One of its sequences has ended. Leaving more often than joining is harmless."""
        count = self._active.get(client, 0)
        if count > 1:
            self._active[client] = count - 1
        elif count:
            del self._active[client]
            self._forget()

    def serve(self, client: str, tokens: int) -> None:
        if client in self._active:
            self._served[client] += tokens

    def _least_active(self) -> float:
        """Entries of the heap may be too low, as clients are served, but never too high: the first that is right is the least."""
        while self._least:
            served, client = self._least[0]
            if client not in self._active or client not in self._served:
                heapq.heappop(self._least)
            elif served < self._served[client]:
                heapq.heapreplace(self._least, (self._served[client], client))
            else:
                return served
        return self._floor

    def _forget(self) -> None:
        """Drop what no longer matters: everything when nobody is active, else those whom a new start would place no lower."""
        if not self._active:
            self._served.clear()
            self._least.clear()
            self._floor = 0.0
        elif len(self._served) > 2 * len(self._active) + 64:
            self._floor = max(self._floor, self._least_active())
            away = sorted((served, client) for client, served in self._served.items() if client not in self._active)
            # At the latest half of them go, so that the names of clients never pile up.
            for place, (served, client) in enumerate(away):
                if served <= self._floor or place < len(away) // 2:
                    del self._served[client]
            self._least = [(self._served[client], client) for client in self._active]
            heapq.heapify(self._least)
