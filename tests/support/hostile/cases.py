"""Malformed, oversized, slow and forged requests, equal for equal seeds."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Union

from .values import BROKEN_JSON, CHUNKS, CODINGS, HEADERS, LENGTHS, METHODS, ODD_TEXTS, ODD_VALUES, PATHS, PREFACES


@dataclass(frozen=True)
class Send:
    data: bytes


@dataclass(frozen=True)
class Wait:
    seconds: float


@dataclass(frozen=True)
class HalfClose:
    pass


@dataclass(frozen=True)
class Vanish:
    """Close without reading; `reset` throws away what is on its way."""

    reset: bool = False


@dataclass(frozen=True)
class Deaf:
    """Read nothing until the server has ended the connection."""


Step = Union[Send, Wait, HalfClose, Vanish, Deaf]


@dataclass(frozen=True)
class Case:
    """`answers`: so many there may be at most."""

    name: str
    steps: tuple[Step, ...]
    answers: int = 1
    is_head: bool = False


LIMITS = {
    "body_bytes": 20_000,
    "header_bytes": 4_000,
    "header_s": 0.3,
    "body_s": 0.3,
    "write_s": 0.5,
    "keep_alive_s": 0.1,
    "patience_s": 0.02,
}
"""Of the server that these requests are meant for, so that "too much" is little and "too slow" is soon."""

Document = Mapping[str, Any]
_JSON = "Content-Type: application/json"
_GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "tiny", "prompt": "Hello", "max_tokens": 3},
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3},
    "/v1/responses": {"model": "tiny", "input": "Hello", "max_output_tokens": 3},
    "/v1/embeddings": {"model": "tiny", "input": "Hello"},
    "/v1/messages": {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3},
    "/v1/messages/count_tokens": {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]},
    "/api/chat": {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "options": {"num_predict": 3}},
    "/api/generate": {"model": "tiny", "prompt": "Hello", "options": {"num_predict": 3}},
    "/api/show": {"model": "tiny"},
    "/v1/rerank": {"model": "tiny", "query": "Hello", "documents": ["One", {"text": "Two"}]},
    "/v1/score": {"model": "tiny", "text_1": "Hello", "text_2": ["One"]},
    "/api/embed": {"model": "tiny", "input": ["Hello"]},
    "/api/embeddings": {"model": "tiny", "prompt": "Hello"},
}


def cases(seed: int, count: int, document: Document) -> Iterator[Case]:
    """`document`: the server's OpenAPI document, whose fields get values of wrong types."""
    for number in range(count):
        chance = random.Random(f"{seed}/{number}")
        (kind,) = chance.choices(list(_KINDS), list(_KINDS.values()))
        made = kind(chance, document)
        yield Case(f"{seed}/{number} {kind.__name__.strip('_')}", made.steps, made.answers, made.is_head)


def request(path: str, body: bytes = b"", *lines: str, method: str = "POST", host: str | None = "localhost", length: bool = True) -> bytes:
    head = [f"{method} {path} HTTP/1.1", *([f"Host: {host}"] if host is not None else []), *lines]
    if length and method == "POST":
        head.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*head, "", ""]).encode("latin-1", "replace") + body


def good(chance: random.Random, document: Document, **fields: Any) -> tuple[str, bytes]:
    path = chance.choice([path for path in _GOOD if path in document["paths"]])
    return path, json.dumps(_GOOD[path] | fields).encode()


def _one(*data: bytes, answers: int = 1) -> Case:
    return Case("", tuple(Send(each) for each in data), answers)


def _fields(chance: random.Random, document: Document) -> dict[str, Any]:
    """One to three fields of a good body, each with a value that it hardly has."""
    path = chance.choice([path for path in _GOOD if path in document["paths"]])
    name = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    known = [*document["components"]["schemas"][name]["properties"], "unknown"]
    body: dict[str, Any] = dict(_GOOD[path])
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        field = chance.choice(known)
        if chance.random() < 0.1:
            body.pop(field, None)
        else:
            body[field] = chance.choice(ODD_VALUES)
    return {"path": path, "body": body}


def _wrong_types(chance: random.Random, document: Document) -> Case:
    made = _fields(chance, document)
    return _one(request(made["path"], json.dumps(made["body"]).encode(), _JSON))


def _broken_json(chance: random.Random, document: Document) -> Case:
    path, body = good(chance, document)
    body = _mutated(chance, body) if chance.random() < 0.5 else chance.choice(BROKEN_JSON)
    return _one(request(path, body, _JSON))


def _mutated(chance: random.Random, data: bytes) -> bytes:
    found = bytearray(data)
    for _ in range(chance.randint(1, 5)):
        at = chance.randrange(len(found) + 1)
        match chance.randrange(4) if found else 1:
            case 0:
                found[at : at + 1] = bytes([chance.randrange(256)])
            case 1:
                found[at:at] = chance.choice((b"\0", b"\r\n", b"\xff", b"\xc3\x28", b'"', b"{", b"[", b" ", b"\\u0000", b"\\ud83d"))
            case 2:
                del found[at : at + chance.randint(1, 10)]
            case _:
                found[at:at] = found[at : at + chance.randint(1, 30)]
    return bytes(found)


def _bytes(chance: random.Random, document: Document) -> Case:
    """Bytes of a whole request are changed, so that anything may come of it, also several requests."""
    path, body = good(chance, document)
    return _one(_mutated(chance, request(path, body, _JSON)), answers=4)


def _noise(chance: random.Random, document: Document) -> Case:
    return _one(chance.randbytes(chance.randint(1, 2000)), answers=4)


def _preface(chance: random.Random, document: Document) -> Case:
    return _one(chance.choice(PREFACES), answers=3)


def _header(chance: random.Random, document: Document) -> Case:
    path, body = good(chance, document)
    lines = chance.sample(HEADERS, chance.choice((1, 1, 2)))
    if chance.random() < 0.5:
        return _one(request(path, body, _JSON, *lines, host=chance.choice(("localhost", "127.0.0.1:1", None))))
    return _one(request("/v1/models", b"", *lines, method="GET"))


def _path(chance: random.Random, document: Document) -> Case:
    method = chance.choice(METHODS)
    path = chance.choice((*PATHS, *document["paths"]))
    return Case("", (Send(request(path, b"{}" if method == "POST" else b"", _JSON, method=method)),), 2, is_head=method == "HEAD")


def _model_name(chance: random.Random, document: Document) -> Case:
    path, body = good(
        chance,
        document,
        model=chance.choice((*ODD_TEXTS, "tiny/../tiny", "file:///etc/passwd", "TINY", "tiny\0", "..", ".", "~", "C:\\x")),
    )
    return _one(request(path, body, _JSON))


def _length(chance: random.Random, document: Document) -> Case:
    path, body = good(chance, document)
    raw = request(path, b"", _JSON, f"Content-Length: {chance.choice(LENGTHS)}", length=False)
    return _one(raw + body, answers=3)


def _smuggled(chance: random.Random, document: Document) -> Case:
    """A second request hides behind a body of doubtful length: it is either part of the body, or never answered after a refusal."""
    path, body = good(chance, document)
    inner = request("/v1/models", b"", method="GET")
    chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    raw = request(
        path,
        b"",
        _JSON,
        f"Transfer-Encoding: {chance.choice(CODINGS)}",
        f"Content-Length: {chance.choice((len(body), len(chunked), 4))}",
        length=False,
    )
    return _one(raw + chunked + inner, answers=1)


def _chunks(chance: random.Random, document: Document) -> Case:
    path, body = good(chance, document)
    raw = request(path, b"", _JSON, f"Transfer-Encoding: {chance.choice((*CODINGS, 'chunked'))}", length=False)
    begun = b"%x\r\n%s\r\n" % (len(body), body) if chance.random() < 0.5 else b""
    return _one(raw + begun + chance.choice(CHUNKS), answers=2)


def _oversized(chance: random.Random, document: Document) -> Case:
    path, _ = good(chance, document)
    size = chance.choice((20_001, 30_000, 79_000, 81_000, 300_000))
    body = b'{"model":"' + b"x" * size + b'"}'
    if chance.random() < 0.3:
        pieces = b"".join(b"1000\r\n" + b"x" * 0x1000 + b"\r\n" for _ in range(size // 0x1000)) + b"0\r\n\r\n"
        return _one(request(path, b"", _JSON, "Transfer-Encoding: chunked", length=False) + pieces)
    if chance.random() < 0.3:
        return _one(request(path, b"", _JSON, f"Content-Length: {size}", "Expect: 100-continue", length=False), body)
    return _one(request(path, body, _JSON))


def _slow(chance: random.Random, document: Document) -> Case:
    path, body = good(chance, document)
    raw = request(path, body, _JSON)
    cut = chance.randrange(len(raw))
    steps: list[Step] = [Send(raw[:cut])]
    for at in range(cut, min(cut + 12, len(raw))):
        steps += [Wait(chance.choice((0.01, 0.05, 0.1))), Send(raw[at : at + 1])]
    if chance.random() < 0.3:
        steps.append(Send(raw[min(cut + 12, len(raw)) :]))
    return Case("", tuple(steps))


def _pipelined(chance: random.Random, document: Document) -> Case:
    count = chance.randint(2, 12)
    parts = []
    for _ in range(count):
        path, body = good(chance, document)
        parts.append(request(path, body, _JSON) if chance.random() < 0.7 else request("/v1/models", b"", method="GET"))
    if chance.random() < 0.4:
        parts[chance.randrange(count)] = chance.choice(PREFACES)
    return _one(b"".join(parts), answers=count + 3)


def _leaving(chance: random.Random, document: Document) -> Case:
    """Half of the time in the middle of an answer, for which there would be more to say."""
    path = chance.choice(
        [
            path
            for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/api/chat", "/v1/messages")
            if path in document["paths"]
        ]
    )
    body = dict(_GOOD[path]) | {"stream": chance.random() < 0.6}
    for limit in ("max_tokens", "max_output_tokens"):
        if limit in body:
            body[limit] = chance.choice((3, 60))
    raw = request(path, json.dumps(body).encode(), _JSON)
    raw = raw[: chance.randrange(len(raw))] if chance.random() < 0.3 else raw
    extra = raw * chance.choice((0, 0, 1, 3))
    end: Step = chance.choice((HalfClose(), Vanish(), Vanish(reset=True)))
    return Case("", (Send(raw + extra), Wait(chance.choice((0, 0, 0.002, 0.01, 0.05))), end), answers=5)


def _deaf(chance: random.Random, document: Document) -> Case:
    raw = request("/openapi.json", b"", *chance.choice(((), ("Connection: close",))), method="GET")
    return Case("", (Send(raw * chance.choice((1, 40))), Deaf()), answers=40)


def _after_the_answer(chance: random.Random, document: Document) -> Case:
    """Something else follows a refusal whose body had not come yet, or an answer."""
    path, body = good(chance, document)
    refused = request(
        path, b"", "Content-Type: text/plain", chance.choice(("Content-Length: 50", "Transfer-Encoding: chunked")), length=False
    )
    first = chance.choice((refused, request(path, body, _JSON)))
    return Case("", (Send(first), Wait(0.05), Send(chance.choice((*CHUNKS, *PREFACES, body)))), answers=4)


_KINDS: Mapping[Callable[[random.Random, Document], Case], int] = {
    _wrong_types: 30, _broken_json: 12, _bytes: 10, _noise: 3, _preface: 3, _header: 7, _path: 7, _model_name: 3, _length: 4, _smuggled: 4,
    _chunks: 4, _oversized: 3, _slow: 2, _pipelined: 3, _leaving: 4, _deaf: 1, _after_the_answer: 3,
}  # fmt: skip
