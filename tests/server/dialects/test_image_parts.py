"""Images in the messages of each dialect: their order, their names in errors, and what is refused before a model is asked."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from typing import Any

import pytest
from support.hostile.cases import request
from support.http.live_server import LiveServer

from mlxinfer.errors import ImageError
from mlxinfer.server.anthropic import blocks
from mlxinfer.server.errors import APIError
from mlxinfer.server.ollama import messages as ollama
from mlxinfer.server.openai import messages as chat
from mlxinfer.server.openai import response_items as responses
from mlxinfer.server.shared.images import (
    MAX_IMAGES,
    PictureQueue,
    SentImage,
    content_of,
    image_of_url,
    joined,
    parts_of,
    sent_images,
    with_places,
)

PIXEL = base64.b64encode(
    base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==")
).decode()
URL = f"data:image/png;base64,{PIXEL}"


def shape(messages: list[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """Roles, and texts or the names of images, in order."""
    parts = [(message["role"], parts_of(message["content"])) for message in messages]
    return [(role, [part.where if isinstance(part, SentImage) else f"{part!r}" for part in found]) for role, found in parts]


def chat_messages(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return chat.for_template([chat.ChatMessage.model_validate_json(json.dumps(each)) for each in messages])


def test_openai_chat() -> None:
    call = {"id": "x", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    image = {"type": "image_url", "image_url": {"url": URL, "detail": "low"}}
    text = {"type": "text", "text": "A"}
    found = chat_messages(
        {"role": "user", "content": [text, image, text, text, {"type": "image_url", "image_url": URL}]},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "x", "content": [image, text]},
        {"role": "user", "content": [text, text]},
    )
    assert shape(found) == [
        ("user", ["'A'", "messages[0].content[1]", "'AA'", "messages[0].content[4]"]),
        ("assistant", ["''"]),
        ("tool", ["messages[2].content[0]", "'A'"]),
        ("user", ["'AA'"]),
    ]
    assert [part.get("detail") for part in found[0]["content"]] == [None, "low", None, None]
    assert found[3]["content"] == "AA"


def test_openai_responses() -> None:
    image = {"type": "input_image", "image_url": URL, "detail": "auto"}
    text = {"type": "input_text", "text": "A"}
    items = [
        {"role": "user", "content": [text, image]},
        {"type": "function_call", "call_id": "x", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "x", "output": [text, image, image]},
    ]
    made = [kind.model_validate_json(json.dumps(item)) for kind, item in zip(_ITEMS, items, strict=True)]
    assert shape(responses.for_template(made)) == [  # type: ignore[arg-type]
        ("user", ["'A'", "input[0].content[1]"]),
        ("assistant", ["''"]),
        ("tool", ["'A'", "input[2].output[1]", "input[2].output[2]"]),
    ]


_ITEMS = (responses.MessageItem, responses.FunctionCallItem, responses.FunctionResultItem)


def test_anthropic() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
    text = {"type": "text", "text": "A"}
    turns = [
        {"role": "user", "content": [image, text]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "look", "input": {}}]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "x", "content": [text, image], "is_error": True}, image, text],
        },
        {"role": "user", "content": "B"},
    ]
    made = [blocks.Turn.model_validate_json(json.dumps(turn)) for turn in turns]
    assert shape(blocks.for_template("S", made)) == [
        ("system", ["'S'"]),
        ("user", ["messages[0].content[0]", "'A'"]),
        ("assistant", ["''"]),
        ("tool", ["'Error: A'", "messages[2].content[0].content[1]"]),
        ("user", ["messages[2].content[1]", "'A\\n\\nB'"]),
    ]


def test_ollama() -> None:
    found = ollama.for_template([ollama.OllamaMessage(role="user", content="A", images=[PIXEL, URL])])
    assert shape(found) == [("user", ["messages[0].images[0]", "messages[0].images[1]", "'A'"])]


_CHAT, _CLAUDE, _RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
_URLS = ("http://169.254.169.254/latest", "https://example.com/a.png", "file:///etc/passwd", "/etc/passwd", "a.png", "data:image/png,abc")


@pytest.mark.parametrize("url", _URLS)
@pytest.mark.parametrize("dialect", [_CHAT, _RESPONSES, "/api/chat"])
def test_urls_and_paths_are_refused(live: LiveServer, dialect: str, url: str) -> None:
    part, where = {
        _CHAT: ({"type": "image_url", "image_url": {"url": url}}, "messages[0].content[0]"),
        _RESPONSES: ({"type": "input_image", "image_url": url}, "input[0].content[0]"),
        "/api/chat": (url, "messages[0].images[0]"),
    }[dialect]
    body: dict[str, Any] = {"input" if dialect == _RESPONSES else "messages": [{"role": "user", "content": [part]}]}
    if dialect == "/api/chat":
        body = {"messages": [{"role": "user", "content": "A", "images": [part]}]}
    status, message = refused(live, dialect, body)
    assert status == 400
    assert message.startswith(f"{where}: ")
    assert "passwd" not in message
    assert "cannot see images" in message if dialect == "/api/chat" and "://" not in url and ":" not in url else "data: URL" in message


@pytest.mark.parametrize("source", [{"type": "url", "url": "http://169.254.169.254"}, {"type": "file", "file_id": "x"}])
def test_claudes_urls_and_files_are_refused_by_name(live: LiveServer, source: dict[str, Any]) -> None:
    for path in (_CLAUDE, f"{_CLAUDE}/count_tokens"):
        content = [{"type": "text", "text": "A"}, {"type": "image", "source": source}]
        status, message = refused(live, path, {"messages": [{"role": "user", "content": content}]})
        assert status == 400
        assert message.startswith("messages[0].content[1].source.type: not possible, because the server fetches nothing")
        assert "169.254" not in message


@pytest.mark.parametrize(
    ("path", "body", "where"),
    [
        (
            _CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": URL}}]}]},
            "messages[0].content[0]",
        ),
        (_RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": URL}]}]}, "input[0].content[0]"),
        (
            _CLAUDE,
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "base64", "data": PIXEL}}]}]},
            "messages[0].content[0]",
        ),
        ("/api/chat", {"messages": [{"role": "user", "content": "A", "images": [PIXEL]}]}, "messages[0].images[0]"),
        ("/api/generate", {"prompt": "A", "images": [PIXEL]}, "images[0]"),
    ],
)
def test_a_text_model_says_that_it_cannot_see(live: LiveServer, path: str, body: dict[str, Any], where: str) -> None:
    status, message = refused(live, path, body)
    assert status == 400
    assert message.startswith(f"{where}: the model cannot see images")


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_only_users_and_tools_have_images(live: LiveServer, role: str) -> None:
    image = {"type": "image_url", "image_url": {"url": URL}}
    status, message = refused(live, _CHAT, {"messages": [{"role": role, "content": [image]}, {"role": "user", "content": "A"}]})
    assert (status, message.partition(": ")[0]) == (400, "messages[0].content[0]")
    status, message = refused(live, "/api/chat", {"messages": [{"role": role, "images": [PIXEL]}, {"role": "user", "content": "A"}]})
    assert (status, message.partition(": ")[0]) == (400, "messages[0].images")


def test_too_many_images_are_refused() -> None:
    content = content_of(SentImage(f"messages[0].content[{number}]", PIXEL) for number in range(MAX_IMAGES + 1))
    assert len(sent_images([{"role": "user", "content": content[:MAX_IMAGES]}])) == MAX_IMAGES
    with pytest.raises(APIError, match=rf"messages\[0\].content\[{MAX_IMAGES}\]: .* at most {MAX_IMAGES}"):
        sent_images([{"role": "user", "content": content}])


def test_contents_are_joined() -> None:
    image = SentImage("x", PIXEL)
    assert joined("A", "B") == "A\n\nB"
    assert joined("", "B") == "B"
    assert parts_of(joined(content_of(["A", image]), "B")) == ["A", image, "B"]
    assert parts_of(joined(content_of([image, "A"]), content_of(["B", image]))) == [image, "A\n\nB", image]


def test_the_engines_errors_get_the_names_of_the_request() -> None:
    messages = [{"role": "user", "content": "A"}, {"role": "user", "content": content_of(["A", SentImage("input[4].output[2]", PIXEL)])}]
    found = with_places(ImageError("messages[1].content[1]: it is truncated"), messages)
    assert (found.status, found.message, found.param) == (400, "input[4].output[2]: it is truncated", "input[4].output[2]")
    assert with_places(ImageError("messages[7].content[1]: odd"), messages).message == "messages[7].content[1]: odd"


@pytest.mark.parametrize("text", ["eA", "!!!!", "", "eA==", base64.b64encode(b"<svg xmlns='x'/>").decode()])
def test_what_is_no_picture_is_refused_with_its_name(text: str) -> None:
    with pytest.raises(APIError, match=r"^messages\[0\].content\[0\]: ") as found:
        SentImage("messages[0].content[0]", text).decoded()
    assert found.value.status == 400


def test_the_queue_is_bounded_and_outlives_its_requests() -> None:
    """Two at once, one more waits, the fourth is refused. The thread of a request that leaves keeps its place until its end."""

    async def check() -> None:
        queue, going = PictureQueue(2, 1), threading.Event()
        running: list[int] = []

        async def work(number: int) -> int:
            running.append(number)
            await asyncio.to_thread(going.wait, 20)
            return number

        tasks = [asyncio.ensure_future(queue.run(lambda number=number: work(number))) for number in range(3)]  # type: ignore[misc]
        while len(running) < 2:
            await asyncio.sleep(0)
        with pytest.raises(APIError) as full:
            await queue.run(lambda: work(9))
        assert full.value.status == 429
        tasks[0].cancel()
        await asyncio.gather(tasks[0], return_exceptions=True)
        with pytest.raises(APIError):
            await queue.run(lambda: work(9))
        going.set()
        assert await asyncio.gather(*tasks[1:]) == [1, 2]
        assert running == [0, 1, 2]
        assert await queue.run(lambda: work(3)) == 3

    asyncio.run(check())


def test_a_request_that_leaves_the_queue_gives_up_its_place() -> None:
    async def check() -> None:
        queue, going = PictureQueue(1, 1), asyncio.Event()

        async def work() -> None:
            await going.wait()

        first = asyncio.ensure_future(queue.run(work))
        second = asyncio.ensure_future(queue.run(work))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        third = asyncio.ensure_future(queue.run(work))
        await asyncio.sleep(0)
        going.set()
        await asyncio.gather(first, third)

    asyncio.run(check())


def refused(live: LiveServer, path: str, fields: dict[str, Any]) -> tuple[int, str]:
    """Status and message of the error."""
    body = {"model": "tiny", **({"max_tokens": 3} if path == _CLAUDE else {}), **fields}
    status, _, raw = live.exchange(request(path, json.dumps(body).encode(), "Content-Type: application/json"))
    error = json.loads(raw)["error"]
    return status, error if isinstance(error, str) else error["message"]


def test_the_media_type_may_have_long_parameters() -> None:
    assert image_of_url(f"data:image/png;name={'a' * 300};base64,{PIXEL}", "here").decoded() == base64.b64decode(PIXEL)


def test_a_system_message_of_anthropic_does_not_ask_for_images(live: LiveServer) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
    turns = [{"role": "user", "content": "A"}]
    raw = json.dumps({"model": "tiny", "max_tokens": 1, "system": [image], "messages": turns}).encode()
    status, _, found = live.exchange(request("/v1/messages", raw, "Content-Type: application/json"))
    assert (status, json.loads(found)["error"]["message"]) == (400, "system[0].type: not supported yet: only text")
