"""Many clients at once, some of which disconnect in the middle."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..hostile.cases import request
from .http_answers import statuses
from .live_server import LiveServer

_CHAT, _COMPLETIONS, _RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


@dataclass(frozen=True)
class Job:
    path: str
    body: str

    @property
    def streams(self) -> bool:
        return bool(json.loads(self.body).get("stream"))

    @property
    def raw(self) -> bytes:
        return request(self.path, self.body.encode(), "Content-Type: application/json", "Connection: close")


def kinds(count: int, seed: int) -> list[Job]:
    """Different requests, all greedy: chats, texts and responses, complete and streamed, short and long, some for two answers."""
    chance = random.Random(seed)
    found = []
    for _ in range(count):
        path = chance.choice((_CHAT, _COMPLETIONS, _RESPONSES))
        text = "".join(chance.choices("abcdefgh XYZ\n", k=chance.randint(1, 300)))
        most, stream = chance.randint(1, 60), chance.random() < 0.6
        body: dict[str, Any] = {"model": "tiny", "temperature": 0, "stream": stream}
        if path == _RESPONSES:
            body |= {"input": text, "max_output_tokens": most}
        else:
            body |= {"prompt": text} if path == _COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
            body |= {"max_tokens": most, "n": chance.choice((1, 1, 2))}
            body |= {"stream_options": {"include_usage": True}} if stream else {}
        found.append(Job(path, json.dumps(body)))
    return found


@dataclass(frozen=True)
class Answer:
    texts: tuple[str, ...]
    reasons: tuple[str, ...]
    tokens: int


async def ask(live: LiveServer, job: Job, *, unix: bool, leave: float | None = None) -> Answer | None:
    """`leave`: the part of the expected bytes after which the client disconnects; then the result is None."""
    connect = asyncio.open_unix_connection(str(live.path)) if unix else asyncio.open_connection("127.0.0.1", live.port)
    reader, writer = await connect
    try:
        writer.write(job.raw)
        await writer.drain()
        if leave is None:
            return answer(job, await reader.read())
        if job.streams:
            most = json.loads(job.body).get("max_tokens") or 20
            for _ in range(round(leave * most)):
                await reader.readline()
        else:
            await asyncio.sleep(leave * 0.05)
        return None
    finally:
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


def answer(job: Job, received: bytes) -> Answer:
    ((status, body),) = statuses(received)
    assert status == 200, body
    if not job.streams:
        return _whole(json.loads(body))
    events = [json.loads(line[6:]) for line in body.decode().splitlines() if line.startswith("data: {")]
    return _response(events) if job.path == _RESPONSES else _pieces(body, events)


def _whole(body: Mapping[str, Any]) -> Answer:
    if "output" in body:
        return Answer((body["output"][0]["content"][0]["text"],), (body["status"],), body["usage"]["output_tokens"])
    choices = sorted(body["choices"], key=lambda choice: choice["index"])
    texts = tuple(choice["message"]["content"] if "message" in choice else choice["text"] for choice in choices)
    return Answer(texts, tuple(choice["finish_reason"] for choice in choices), body["usage"]["completion_tokens"])


def _response(events: Sequence[Mapping[str, Any]]) -> Answer:
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    found = _whole(events[-1]["response"])
    assert found.texts == (text,)
    return found


def _pieces(body: bytes, events: Sequence[Mapping[str, Any]]) -> Answer:
    assert body.endswith(b"data: [DONE]\n\n")
    assert len({event["id"] for event in events}) == 1
    *pieces, usage = events
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    for event in pieces:
        (choice,) = event["choices"]
        assert choice["index"] not in reasons
        texts[choice["index"]] = texts.get(choice["index"], "") + (
            choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        )
        if choice["finish_reason"]:
            reasons[choice["index"]] = choice["finish_reason"]
    return Answer(tuple(texts[i] for i in sorted(texts)), tuple(reasons[i] for i in sorted(texts)), usage["usage"]["completion_tokens"])
