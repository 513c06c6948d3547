"""Images through the clients of each API, for a model that sees: two pictures give two answers on every surface."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.hostile.cases import request
from support.http.live_server import LiveServer, live_server, openai_client
from support.http.pictures import base64_of, data_url, noise, saved
from support.models.seeing import GOLDEN
from support.processes.optional import needs

from mlxinfer.engine.async_llm import AsyncLLM
from mlxinfer.engine.llm import LLM
from mlxinfer.types import SamplingParams

openai, anthropic, ollama, httpx, httpx2 = needs("openai"), needs("anthropic"), needs("ollama"), needs("httpx"), needs("httpx2")

ONE, OTHER = saved(noise(1)), saved(noise(2))
TOKENS = 96
ASKED = "What is this?"
SAMPLED: Any = {"temperature": 1, "seed": 7}
"""Sampled answers show small differences between logits. Greedy ones of a random model may repeat one token."""
LOOK: dict[str, Any] = {"type": "object", "properties": {}}


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    with live_server({"tiny": lambda: AsyncLLM(GOLDEN / "smolvlm")}) as server:
        yield server


class Clients:
    """The clients of all APIs. Each method returns the answer to a picture, as text."""

    def __init__(self, live: LiveServer, gpt: Any, claude: Any, llama: Any) -> None:
        self.live, self.gpt, self.claude, self.llama = live, gpt, claude, llama

    def chat(self, picture: bytes, stream: bool) -> str:
        content = [{"type": "image_url", "image_url": {"url": data_url(picture)}}, {"type": "text", "text": ASKED}]
        return self._chat([{"role": "user", "content": content}], stream)

    def chat_tool(self, picture: bytes, stream: bool) -> str:
        call = {"id": "x", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        content = [{"type": "text", "text": "Taken."}, {"type": "image_url", "image_url": {"url": data_url(picture)}}]
        asked = [{"role": "user", "content": ASKED}, {"role": "assistant", "tool_calls": [call]}]
        return self._chat([*asked, {"role": "tool", "tool_call_id": "x", "content": content}], stream)

    def _chat(self, messages: Any, stream: bool) -> str:
        made = self.gpt.chat.completions.create(model="tiny", messages=messages, max_tokens=TOKENS, stream=stream, **SAMPLED)
        if not stream:
            return str(made.choices[0].message.content)
        return "".join(choice.delta.content or "" for event in made for choice in event.choices)

    def responses(self, picture: bytes, stream: bool) -> str:
        content = [{"type": "input_image", "image_url": data_url(picture)}, {"type": "input_text", "text": ASKED}]
        return self._responses([{"role": "user", "content": content}], stream)

    def responses_tool(self, picture: bytes, stream: bool) -> str:
        """Codex sends screenshots so."""
        call = {"type": "function_call", "call_id": "x", "name": "view_image", "arguments": "{}"}
        output = [{"type": "input_image", "image_url": data_url(picture)}]
        asked = [{"role": "user", "content": ASKED}, call]
        return self._responses([*asked, {"type": "function_call_output", "call_id": "x", "output": output}], stream)

    def _responses(self, items: Any, stream: bool) -> str:
        made = self.gpt.responses.create(
            model="tiny", input=items, max_output_tokens=TOKENS, stream=stream, temperature=1, extra_body={"seed": 7}
        )
        if not stream:
            return str(made.output_text)
        return "".join(event.delta for event in made if event.type == "response.output_text.delta")

    def messages(self, picture: bytes, stream: bool) -> str:
        return self._messages([{"role": "user", "content": [_block(picture), {"type": "text", "text": ASKED}]}], stream)

    def messages_tool(self, picture: bytes, stream: bool) -> str:
        """Claude Code sends screenshots so."""
        used = {"type": "tool_use", "id": "x", "name": "Read", "input": {"file_path": "a.png"}}
        result = {"type": "tool_result", "tool_use_id": "x", "content": [_block(picture)]}
        asked = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": [used]}]
        return self._messages([*asked, {"role": "user", "content": [result]}], stream)

    def _messages(self, turns: Any, stream: bool) -> str:
        body = {"model": "tiny", "messages": turns, "max_tokens": TOKENS, "extra_body": SAMPLED}
        if not stream:
            return str(self.claude.messages.create(**body).content[0].text)
        with self.claude.messages.stream(**body) as events:
            return "".join(events.text_stream)

    def ollama_chat(self, picture: bytes, stream: bool) -> str:
        return self._ollama_chat([{"role": "user", "content": ASKED, "images": [picture]}], stream)

    def ollama_tool(self, picture: bytes, stream: bool) -> str:
        call = {"function": {"name": "look", "arguments": {}}}
        asked = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        return self._ollama_chat([*asked, {"role": "tool", "tool_name": "look", "content": "", "images": [picture]}], stream)

    def _ollama_chat(self, messages: Any, stream: bool) -> str:
        made = self.llama.chat(model="tiny", messages=messages, stream=stream, options={**SAMPLED, "num_predict": TOKENS})
        return "".join(part.message.content for part in made) if stream else str(made.message.content)

    def ollama_generate(self, picture: bytes, stream: bool) -> str:
        options = {**SAMPLED, "num_predict": TOKENS}
        made = self.llama.generate(model="tiny", prompt=ASKED, images=[picture], stream=stream, options=options)
        return "".join(part.response for part in made) if stream else str(made.response)


def _block(picture: bytes) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": base64_of(picture)}}


@pytest.fixture
def clients(live: LiveServer) -> Iterator[Clients]:
    http = httpx2.Client(transport=httpx2.HTTPTransport(uds=str(live.path), verify=False), timeout=60)
    llama = ollama.Client(live.url, transport=httpx.HTTPTransport(uds=str(live.path), verify=False), timeout=60)
    with (
        openai_client(live, unix=True) as gpt,
        anthropic.Anthropic(base_url=live.url, api_key="x", max_retries=0, http_client=http) as claude,
    ):
        yield Clients(live, gpt, claude, llama)


_FROM_USERS = (Clients.chat, Clients.responses, Clients.messages, Clients.ollama_chat, Clients.ollama_generate)
_FROM_TOOLS = (Clients.chat_tool, Clients.responses_tool, Clients.messages_tool, Clients.ollama_tool)
Surface = Callable[[Clients, bytes, bool], str]


@pytest.mark.parametrize("surface", [*_FROM_USERS, *_FROM_TOOLS], ids=lambda each: each.__name__)
def test_two_pictures_give_two_answers(clients: Clients, surface: Surface) -> None:
    answers = [surface(clients, picture, stream) for stream in (False, True) for picture in (ONE, OTHER)]
    assert answers[0] == answers[2] != answers[3] == answers[1]


def test_all_surfaces_show_the_model_the_same(clients: Clients) -> None:
    content = [{"type": "image", "image": ONE}, {"type": "text", "text": ASKED}]
    with LLM(GOLDEN / "smolvlm", max_context=1024) as llm:
        wanted = llm.chat([{"role": "user", "content": content}], SamplingParams(max_tokens=TOKENS, **SAMPLED)).text
    assert {surface.__name__: surface(clients, ONE, False) for surface in _FROM_USERS} == dict.fromkeys(
        [each.__name__ for each in _FROM_USERS], wanted
    )


def test_the_order_of_parts_is_kept(clients: Clients) -> None:
    url = {"type": "image_url", "image_url": {"url": data_url(ONE)}}
    before, after = {"type": "text", "text": "Before"}, {"type": "text", "text": "After"}
    orders = ([url, before, after], [before, url, after], [before, after, url])
    assert len({clients._chat([{"role": "user", "content": list(order)}], False) for order in orders}) == 3


def test_usage_and_timings(clients: Clients) -> None:
    content = [{"type": "image_url", "image_url": {"url": data_url(saved(noise(7, (300, 200))))}}, {"type": "text", "text": "Hi"}]
    messages: Any = [{"role": "user", "content": content}]
    whole = clients.gpt.chat.completions.create(model="tiny", messages=messages, max_tokens=3)
    tokens = whole.usage.prompt_tokens_details.image_tokens
    assert 0 < tokens < whole.usage.prompt_tokens
    timings = whole.model_extra["timings"]
    assert (timings["images"], timings["images_cached"]) == (1, 0)
    assert timings["image_decode_ms"] > 0
    assert timings["image_encode_ms"] > 0
    ((given, seen),) = [(each["picture"], each["seen"]) for each in timings["resized"]]
    assert given == [300, 200] != seen
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    *_, last = clients.gpt.chat.completions.create(model="tiny", messages=messages, max_tokens=3, **options)
    assert last.usage.prompt_tokens_details.image_tokens == tokens
    assert last.model_extra["timings"]["images_cached"] == 1
    items: Any = [{"role": "user", "content": [{"type": "input_image", "image_url": data_url(ONE)}]}]
    response = clients.gpt.responses.create(model="tiny", input=items, max_output_tokens=3)
    assert response.usage.input_tokens_details.model_extra["image_tokens"] > 0
    assert response.model_extra["timings"]["images"] == 1
    turns: Any = [{"role": "user", "content": [_block(ONE)]}]
    message = clients.claude.messages.create(model="tiny", messages=turns, max_tokens=3)
    assert clients.claude.messages.count_tokens(model="tiny", messages=turns).input_tokens == message.usage.input_tokens > tokens
    text = clients.gpt.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hi"}], max_tokens=3)
    assert "timings" not in text.model_extra
    assert text.usage.prompt_tokens_details.image_tokens is None


def test_settings_of_an_image(clients: Clients) -> None:
    url = data_url(saved(noise(7, (300, 200))))

    def tokens(**part: Any) -> int:
        content: Any = [{"type": "image_url", **part}]
        answer = clients.gpt.chat.completions.create(model="tiny", messages=[{"role": "user", "content": content}], max_tokens=1)
        return int(answer.usage.prompt_tokens_details.image_tokens)

    def of_responses(**part: Any) -> int:
        items: Any = [{"role": "user", "content": [{"type": "input_image", "image_url": url, **part}]}]
        answer = clients.gpt.responses.create(model="tiny", input=items, max_output_tokens=1)
        return int(answer.usage.input_tokens_details.model_extra["image_tokens"])

    whole, low = tokens(image_url={"url": url}), tokens(image_url={"url": url, "detail": "low"})
    assert low < whole
    assert tokens(image_url={"url": url, "detail": "auto"}) == tokens(image_url=url) == of_responses() == whole
    assert tokens(image_url=url, detail="low") == of_responses(detail="low") == low
    assert tokens(image_url=url, detail="original") == tokens(image_url=url, detail="high")
    assert tokens(image_url=url, max_pixels=1000) == of_responses(max_pixels=1000) < whole


def test_counting_decodes_nothing(clients: Clients) -> None:
    whole, cut = ([{"role": "user", "content": [_block(data)]}] for data in (ONE, ONE[:-400]))
    counts = [clients.claude.messages.count_tokens(model="tiny", messages=turns).input_tokens for turns in (whole, cut)]
    assert counts[0] == counts[1] > 40
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[0\]: .* truncated"):
        clients.claude.messages.create(model="tiny", messages=cut, max_tokens=2)


def test_lists_say_that_the_model_sees(clients: Clients) -> None:
    (model,) = clients.gpt.models.list().data
    assert "vision" in model.capabilities
    assert model.architecture == {"input_modalities": ["text", "image"], "output_modalities": ["text"]}
    assert "vision" in clients.llama.show("tiny").capabilities
    _, _, info = clients.live.exchange(request("/model_info", method="GET"))
    assert json.loads(info)["has_image_understanding"] is True


def test_images_are_counted(clients: Clients) -> None:
    def counters() -> dict[str, float]:
        text = clients.live.exchange(request("/metrics", method="GET"))[2].decode()
        return {name: float(value) for name, value in re.findall(r"^mlxinfer_(image\w+)_total\{.*\} (\S+)$", text, re.MULTILINE)}

    before = counters()
    picture = saved(noise(11))
    for _ in range(2):
        clients.chat(picture, False)
    after = counters()
    assert {name: after[name] - before[name] for name in ("images", "images_cached")} == {"images": 2, "images_cached": 1}
    assert after["image_tokens"] > before["image_tokens"]
    assert after["image_encode_seconds"] > before["image_encode_seconds"]


def test_placeholders_of_users_stay_text(clients: Clients) -> None:
    for text in ("<image>", "<fake_token_around_image><global-img><image>"):
        answer = clients.gpt.chat.completions.create(model="tiny", messages=[{"role": "user", "content": text}], max_tokens=2)
        assert answer.usage.prompt_tokens_details.image_tokens is None
        content: Any = [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": data_url(ONE)}}]
        answer = clients.gpt.chat.completions.create(model="tiny", messages=[{"role": "user", "content": content}], max_tokens=2)
        assert answer.model_extra["timings"]["images"] == 1


def test_images_and_a_required_call(clients: Clients) -> None:
    tool: Any = {"type": "function", "function": {"name": "look", "parameters": LOOK}}
    content: Any = [{"type": "image_url", "image_url": {"url": data_url(ONE)}}, {"type": "text", "text": "Hi"}]
    answer = clients.gpt.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": content}], tools=[tool], tool_choice="required", max_tokens=60
    )
    assert answer.choices[0].message.tool_calls[0].function.name == "look"


def test_a_conversation_keeps_its_cache(clients: Clients) -> None:
    """Ten turns; the first, the fourth and the seventh have a picture. Each turn reuses nearly all of the one before."""
    messages: list[Any] = []
    before = 0
    for turn in range(10):
        parts: list[Any] = [{"type": "text", "text": f"Question {turn}"}]
        if turn in (0, 3, 6):
            parts.insert(0, {"type": "image_url", "image_url": {"url": data_url(saved(noise(20 + turn)))}})
        messages.append({"role": "user", "content": parts})
        answer = clients.gpt.chat.completions.create(model="tiny", messages=messages, max_tokens=6, temperature=0)
        usage = answer.usage
        if turn:
            assert usage.prompt_tokens_details.cached_tokens > before - 64
            assert answer.model_extra["timings"]["images_cached"] >= answer.model_extra["timings"]["images"] - (turn in (3, 6))
        before = usage.prompt_tokens
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
