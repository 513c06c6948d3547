"""The prompts."""

from __future__ import annotations

import json
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

Messages = list[dict[str, str]]
_LETTERS_A_TOKEN = 8

_TEXTS = json.loads(Path(__file__).with_name("texts.json").read_text(encoding="utf-8"))
STORIES: tuple[str, ...] = tuple(_TEXTS["stories"])
STORY = STORIES[0]
QUESTIONS: tuple[str, ...] = tuple(_TEXTS["questions"])
CODE = "\n".join(_TEXTS["code"])
_RENAMED = (("total", "amount"), ("describe_order", "print_receipt"), ("customer", "client"), ("lines", "rows"))


def text() -> str:
    """Technical prose that every installation has: Python's language reference."""
    first = ("assignment", "class", "import")
    return "".join(topics[name] for name in [*first, *sorted(topics.keys() - set(first))])


def passage(tokenizer: Any, tokens: int, number: int) -> str:
    """Technical prose of about `tokens` tokens. Passages of different numbers have no common prefix."""
    start = f"{number}. edition.\n\n" + text()[: tokens * _LETTERS_A_TOKEN]
    cut: str = tokenizer.decode(tokenizer.encode(start)[:tokens])
    return cut


def edits() -> list[Messages]:
    """Prompts whose answers mostly repeat the prompt."""
    ask = "Rename `{}` to `{}` in this code, and give all of the code again."
    return [[{"role": "user", "content": f"{ask.format(*names)}\n\n```python\n{CODE}```"}] for names in _RENAMED]
