"""Depth of definitions that refer to one another, which bounds the stack of llguidance's recursive reader."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def longest_chain(references: Mapping[str, Iterable[str]], weights: Mapping[str, int]) -> tuple[int, str]:
    """Return (largest sum of weights along a chain of references without repetition, name at its start).

    A cycle counts with all of its definitions, which is an upper bound. Unknown references are ignored.
    """
    known = {name: [other for other in dict.fromkeys(others) if other in references] for name, others in references.items()}
    circle = _circles(known)
    total: dict[str, int] = {}
    for name in known:
        total[circle[name]] = total.get(circle[name], 0) + weights[name]
    below: dict[str, int] = {}
    longest = (0, "")
    for name in reversed(list(circle)):  # a cycle comes before definitions that lead to it
        mine = circle[name]
        below.setdefault(mine, 0)
        for other in known[name]:
            if circle[other] != mine:
                below[mine] = max(below[mine], total[circle[other]] + below[circle[other]])
    for name in known:
        longest = max(longest, (total[circle[name]] + below[circle[name]], name))
    return longest


def _circles(references: Mapping[str, list[str]]) -> dict[str, str]:
    """Map each name to a representative of its cycle (Kosaraju's algorithm); names that lead to a cycle come before it."""
    backwards: dict[str, list[str]] = {name: [] for name in references}
    for name, others in references.items():
        for other in others:
            backwards[other].append(name)
    found: dict[str, str] = {}
    for name in reversed(_finished(references)):
        if name in found:
            continue
        waiting, found[name] = [name], name
        while waiting:
            for other in backwards[waiting.pop()]:
                if other not in found:
                    found[other] = name
                    waiting.append(other)
    return found


def _finished(references: Mapping[str, list[str]]) -> list[str]:
    """Return all names in postorder: each after the names that it refers to, except in cycles."""
    order: list[str] = []
    seen: set[str] = set()
    for first in references:
        if first in seen:
            continue
        seen.add(first)
        stack = [(first, iter(references[first]))]
        while stack:
            name, others = stack[-1]
            following = next((other for other in others if other not in seen), None)
            if following is None:
                order.append(name)
                stack.pop()
            else:
                seen.add(following)
                stack.append((following, iter(references[following])))
    return order
