"""Chats with calls of tools: random ones, the answers that chat templates render for them, and what a reader makes of an answer."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mlxinfer.output_format import OutputEvent, OutputFormat, messages_for_template
from mlxinfer.output_format.reader import OutputReader
from mlxinfer.structure import Schema
from mlxinfer.tokenizer.chat_template import ChatTemplates
from mlxinfer.tools import Tool, Tools

Call = tuple[str, dict[str, Any]]

_PROPERTIES = {
    "city": {"type": "string", "description": "a"},
    "path_name": {"type": "string", "description": "b"},
    "count": {"type": "integer", "description": "c"},
    "ratio": {"type": "number", "description": "d"},
    "flag": {"type": "boolean", "description": "e"},
    "options": {"type": "object", "description": "g", "properties": {}},
    "items": {"type": "array", "description": "h", "items": {"type": "string"}},
}
TOOLS: Tools = {
    name: Tool(name, "does it", Schema({"type": "object", "properties": _PROPERTIES, "required": ["city"]}))
    for name in ("get", "get_weather", "write-file", "a.b")
}
TEXTS = (
    *("Paris", "", "a b", "x < y && z > 1", "line1\nline2\n  indented", "tag </p> & <b>", "\"quoted\" 'single'", "ünï 格 🦊"),
    *('{"a": 1}', "C:\\path\\new", "print('</p>')\n\n", "[1,2]", "3", "true", "tab\there", "back`tick ```json\n{}\n```", "<tool", "}}"),
    *("\\", "é\u2028"),
)


class TemplateOnly:
    """A chat template as derivation asks for it, without a tokenizer."""

    def __init__(self, source: str) -> None:
        self.chat_template: str | None = source
        self._templates = ChatTemplates({"default": source}, {"bos_token": "<s>", "eos_token": "</s>"})

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, tools: Any = None, **variables: Any
    ) -> str:
        return self._templates.render(messages, tools, {"add_generation_prompt": add_generation_prompt, **variables})


def random_value(rng: random.Random, depth: int = 0) -> Any:
    kinds = (lambda: rng.choice(TEXTS), lambda: rng.randint(-(10**6), 10**6), lambda: rng.choice((True, False, None, 0.5, -2.25, 1e30)))
    if depth < 2 and rng.random() < 0.5:
        if rng.random() < 0.5:
            return {rng.choice(("q", "r_1", "ключ")): random_value(rng, depth + 1) for _ in range(rng.randint(0, 2))}
        return [random_value(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    return rng.choice(kinds)()


def random_call(rng: random.Random) -> Call:
    """A call of one of `TOOLS` that fits its schema."""
    made: dict[str, Any] = {"city": rng.choice(TEXTS)}
    further = {
        "path_name": lambda: rng.choice(TEXTS) + rng.choice(TEXTS),
        "count": lambda: rng.randint(-5, 10**9),
        "ratio": lambda: rng.choice((0.5, -1e-7, 3, 12.0)),
        "flag": lambda: rng.random() < 0.5,
        "options": lambda: {"q": random_value(rng), "n": None, "x y": rng.choice(TEXTS)},
        "items": lambda: [rng.choice(TEXTS) for _ in range(rng.randint(0, 3))],
    }
    for name in rng.sample(sorted(further), rng.randint(0, 4)):
        made[name] = further[name]()
    names = list(made)
    rng.shuffle(names)
    return rng.choice(list(TOOLS)), {name: made[name] for name in names}


def random_calls(rng: random.Random, parallel: bool = True) -> list[Call]:
    return [random_call(rng) for _ in range(rng.choice((1, 1, 2, 3)) if parallel else 1)]


def calls_message(calls: Sequence[Call], content: str = "") -> dict[str, Any]:
    """An answer as OpenAI's API has it: arguments are JSON text."""
    made = [
        {"id": f"call0000{i}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}}
        for i, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": content, "tool_calls": made}


USER = "userQuux"


def rendered_answer(templates: TemplateOnly, format: OutputFormat, answer: Mapping[str, Any]) -> tuple[str, str]:
    """(the prompt's end, what the model would have written) for an answer with calls."""
    messages, tools = messages_for_template(format, [{"role": "user", "content": USER}, answer], TOOLS)
    prompt = templates.render_chat(messages[:-1], tools=tools).rpartition(USER)[2]
    text = templates.render_chat(messages, tools=tools, add_generation_prompt=False).rpartition(USER)[2]
    return (prompt, text[len(prompt) :]) if text.startswith(prompt) else ("", text)


def merged(events: Iterable[OutputEvent]) -> list[tuple[str, str]]:
    """Events with neighbours of one kind as one."""
    found: list[tuple[str, str]] = []
    for kind, text in events:
        if found and found[-1][0] == kind and kind not in ("call_begin", "call_end"):
            found[-1] = kind, found[-1][1] + text
        else:
            found.append((kind, text))
    return found


def read(format: OutputFormat, text: str, cuts: Iterable[int] = (), begun: str = "", tools: Tools = TOOLS) -> list[tuple[str, str]]:
    """Return the parts that a reader finds in a text in pieces, cut at `cuts`."""
    reader, events, last = OutputReader(format, tools, begun), [], 0
    for cut in (*cuts, len(text)):
        events += reader.add(text[last:cut])
        last = cut
    return merged([*events, *reader.finish()])


def calls_in(events: Iterable[tuple[str, str]]) -> list[Call]:
    """The complete calls."""
    calls: list[Call] = []
    name, text = "", ""
    for kind, piece in events:
        if kind == "call_begin":
            name, text = piece, ""
        elif kind == "arguments":
            text += piece
        elif kind == "call_end":
            calls.append((name, json.loads(text)))
    return calls


def groupings(text: str, rng: random.Random, count: int) -> Iterable[list[int]]:
    """Random ways to cut a text into pieces."""
    for _ in range(count):
        share = rng.choice((0.02, 0.1, 0.3, 0.7))
        yield [place for place in range(1, len(text)) if rng.random() < share]


def check_every_cut(format: OutputFormat, text: str, begun: str, rng: random.Random, groups: int = 100) -> None:
    """The same events however the text comes: in two pieces cut anywhere, letter by letter, and in random pieces."""
    whole = read(format, text, begun=begun)
    for cut in range(len(text) + 1):
        assert read(format, text, [cut], begun) == whole, (text[:cut], text[cut:])
    for cuts in (range(1, len(text)), *groupings(text, rng, groups)):
        assert read(format, text, cuts, begun) == whole, (text, list(cuts))
