"""Prints docs/request-fields.md, the request fields that have no effect or accept only some values.

python docs/site/request_fields.py > docs/request-fields.md
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from mlxinfer.server.anthropic.messages import CountRequest
from mlxinfer.server.anthropic.protocol import MessageRequest
from mlxinfer.server.ollama.embeddings import EmbedRequest, OldEmbeddingRequest
from mlxinfer.server.ollama.generate import OllamaChatRequest, OllamaGenerateRequest
from mlxinfer.server.ollama.models import ShowRequest
from mlxinfer.server.openai.chat import ChatRequest
from mlxinfer.server.openai.completions import CompletionRequest
from mlxinfer.server.openai.embeddings import EmbeddingRequest
from mlxinfer.server.openai.reranking import RerankRequest, ScoreRequest
from mlxinfer.server.openai.responses import ResponseRequest
from mlxinfer.server.validation import Ignored, OneOf, Unsupported

BODIES: dict[type[BaseModel], str] = {
    ChatRequest: "/v1/chat/completions",
    CompletionRequest: "/v1/completions",
    ResponseRequest: "/v1/responses",
    MessageRequest: "/v1/messages",
    CountRequest: "/v1/messages/count_tokens",
    OllamaChatRequest: "/api/chat",
    OllamaGenerateRequest: "/api/generate",
    ShowRequest: "/api/show",
    EmbeddingRequest: "/v1/embeddings",
    RerankRequest: "/v1/rerank",
    ScoreRequest: "/v1/score",
    EmbedRequest: "/api/embed",
    OldEmbeddingRequest: "/api/embeddings",
}
"""The bodies of requests, by the path that they are sent to."""
_OPENAI = {BODIES[body] for body in (ChatRequest, CompletionRequest, ResponseRequest)}

_HEAD = """# Request fields without effect, and refused fields

Programs send many fields that have no effect here. The server accepts these fields, and logs each of them once. A field
that asks for an unsupported feature is refused. The error names all faulty fields of the request.
`docs/site/request_fields.py` generates this page from the types of the requests.

## Accepted without effect

| field | where | because |
| --- | --- | --- |
"""
_MIDDLE = """
## Refused, except for some values

A missing field and null are always accepted.

| field | where | accepted | otherwise |
| --- | --- | --- | --- |
"""


def page() -> str:
    """Return the whole page, in Markdown."""
    ignored: dict[tuple[str, str], set[str]] = {}
    refused: dict[tuple[str, str, str], set[str]] = {}
    for body, path in BODIES.items():
        for name, mark in _marks(body, ""):
            if isinstance(mark, Ignored):
                ignored.setdefault((name, mark.why), set()).add(path)
            elif not isinstance(mark, OneOf):
                refused.setdefault((name, _shown(mark.values), mark.why), set()).add(path)
    rows = "".join(f"| `{name}` | {_where(paths)} | {why} |\n" for (name, why), paths in sorted(ignored.items()))
    more = "".join(f"| `{name}` | {_where(paths)} | {taken} | {why} |\n" for (name, taken, why), paths in sorted(refused.items()))
    return _HEAD + rows + _MIDDLE + more


def _where(paths: set[str]) -> str:
    return "OpenAI's API" if paths == _OPENAI else ", ".join(f"`{path}`" for path in BODIES.values() if path in paths)


def _marks(body: type[BaseModel], prefix: str, seen: tuple[type, ...] = ()) -> Iterator[tuple[str, Ignored | Unsupported]]:
    """Yield names and marks of all fields; fields of nested objects are `outer.inner`."""
    for name, field in body.model_fields.items():
        where = f"{prefix}{field.alias or name}"
        found = {id(mark): mark for mark in _of_type(field.annotation, field.metadata, where, (*seen, body))}
        for mark in found.values():
            yield mark if isinstance(mark, tuple) else (where, mark)


def _of_type(kind: Any, metadata: list[Any], where: str, seen: tuple[type, ...]) -> Iterator[Any]:
    yield from (mark for mark in metadata if isinstance(mark, (Ignored, Unsupported)))
    if get_origin(kind) is Annotated:
        inner, *marks = get_args(kind)
        yield from _of_type(inner, marks, where, seen)
    elif isinstance(kind, type) and issubclass(kind, BaseModel):
        if kind not in seen:
            yield from _marks(kind, f"{where}.", seen)
    elif get_origin(kind) is list:
        (inner,) = get_args(kind)
        yield from _of_type(inner, [], f"{where}[]", seen)
    elif get_origin(kind) is Union or type(kind).__name__ == "UnionType":
        for each in get_args(kind):
            yield from _of_type(each, [], where, seen)


def _shown(values: list[Any]) -> str:
    """Values as JSON, for a cell of a table."""
    return ", ".join(f"`{json.dumps(value)}`" for value in values if value is not None).replace("|", "\\|") or "nothing"


if __name__ == "__main__":
    import sys

    sys.stdout.write(page())
