"""Events as they go over the wire."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlxinfer.server import sse

CHOICES = [{"index": 0, "delta": {"content": 'é "\n</script>'}, "logprobs": None, "finish_reason": None}]


@pytest.mark.parametrize("after", [{}, {"usage": None}, {"a": [1.5], "b": "x"}], ids=str)
def test_a_template_gives_what_the_whole_would(after: dict[str, Any]) -> None:
    before = {"id": "chatcmpl-1", "created": 5, "model": 'ä"'}
    assert sse.Template(before, "choices", after).data(CHOICES) == sse.data({**before, "choices": CHOICES, **after})


def test_an_event_is_one_line_of_json() -> None:
    for found in (sse.data(CHOICES), sse.event("x", CHOICES).removeprefix(b"event: x\n")):
        (line,) = found.removesuffix(b"\n\n").split(b"\n")
        assert json.loads(line.removeprefix(b"data: ")) == CHOICES
