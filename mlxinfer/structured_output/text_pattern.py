"""`pattern` of a JSON Schema as an expression for a whole text."""

from __future__ import annotations

_CLASSES = {"d": "0-9", "w": "A-Za-z0-9_"}
"""ECMAScript means ASCII, Rust all of Unicode."""


def whole_text(pattern: str) -> str | None:
    """The expression, in Rust's dialect, that a text fits as a whole if `pattern` is found in it; None for anchors inside."""
    begins, ends = pattern.startswith("^"), pattern.endswith("$") and not _is_escaped(pattern)
    inner = pattern[int(begins) : len(pattern) - int(ends)]
    made: list[str] = []
    depth, in_set, place = 0, False, 0
    while place < len(inner):
        character = inner[place]
        place += 1
        if character == "\\" and place < len(inner):
            found = _CLASSES.get(inner[place])
            escape = f"\\{inner[place]}" if found is None else found if in_set else f"[{found}]"
            made.append(escape)
            place += 1
            continue
        if in_set:
            in_set = character != "]"
        elif character == "[":
            in_set = True
            if inner[place : place + 1] == "^":
                character += "^"
                place += 1
        elif character in "^$" or (character == "|" and not depth and (begins or ends)):
            return None
        depth += 0 if in_set else (character == "(") - (character == ")")
        made.append(character)
    body = f"(?:{''.join(made)})"
    return f"{'' if begins else '(?s:.*)'}{body}{'' if ends else '(?s:.*)'}"


def _is_escaped(pattern: str) -> bool:
    """Whether the last character stands for itself."""
    before = pattern[:-1]
    return (len(before) - len(before.rstrip("\\"))) % 2 == 1
