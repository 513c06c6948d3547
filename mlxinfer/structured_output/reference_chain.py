"""How deep definitions lead into one another: whoever reads them recursively needs that much stack, and llguidance does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def longest_chain(references: Mapping[str, Iterable[str]], weights: Mapping[str, int]) -> tuple[int, str]:
    """The largest sum of weights along a chain of definitions that refer to one another, none of them twice, and where it begins. Of
    those that refer to each other in a circle all are counted, which may be too many. References to what is not there are left out."""
    known = {name: [other for other in dict.fromkeys(others) if other in references] for name, others in references.items()}
    circle = _circles(known)
    total: dict[str, int] = {}
    for name in known:
        total[circle[name]] = total.get(circle[name], 0) + weights[name]
    below: dict[str, int] = {}
    longest = (0, "")
    for name in reversed(list(circle)):  # a circle comes before those that lead to it
        mine = circle[name]
        below.setdefault(mine, 0)
        for other in known[name]:
            if circle[other] != mine:
                below[mine] = max(below[mine], total[circle[other]] + below[circle[other]])
    for name in known:
        longest = max(longest, (total[circle[name]] + below[circle[name]], name))
    return longest


def _circles(references: Mapping[str, list[str]]) -> dict[str, str]:
    """One name for each circle, by the names in it; those that lead to a circle come before it."""
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
    """All names, each after what it leads to, but for circles."""
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
