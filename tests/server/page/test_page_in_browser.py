"""The page in headless Chromium against a live server, used as a person would."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from support.http.chromium import ANSWER, Chat, OpenPage
from support.http.live_server import LiveServer, live_server

from mlxinfer.engine.async_llm import AsyncLLM

pytestmark = pytest.mark.long

KEY = "a key of the test"
WATCH = """() => {
  globalThis.seen = new Set(); // the texts of the answer
  const watcher = new MutationObserver(() => seen.add(document.querySelector(".turn.assistant:last-child > .md")?.textContent));
  watcher.observe(document.querySelector("#transcript"), { childList: true, subtree: true });
}"""
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}
]


def drop_connections(server: LiveServer) -> None:
    """Drop all connections, as a killed server does."""
    for connection in list(server.server.server_state.connections):
        connection.loop.call_soon_threadsafe(connection.transport.abort)


def test_a_table_and_code(chat: Chat) -> None:
    chat.ask("Tides?", "scripted")
    page = chat.page
    assert page.inner_text(".md h3") == "Tides"
    assert page.locator(".md td").all_inner_texts() == ["Fundy", "16.3 m"]
    assert page.inner_text(".md pre") == 'print("<b>&</b>")'
    assert page.get_attribute(".md a", "href") == "https://example.org/x"
    assert "noopener" in page.get_attribute(".md a", "rel")
    chat.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.click("[aria-label='Copy code']")
    assert page.evaluate("() => navigator.clipboard.readText()") == 'print("<b>&</b>")'
    page.click(".turn.assistant [aria-label=Copy]")
    assert page.evaluate("() => navigator.clipboard.readText()") == ANSWER


def test_stop(chat: Chat, page_server: LiveServer) -> None:
    chat.send("Write for ever", "endless")
    chat.page.wait_for_selector(".turn.assistant.running .md > *")
    chat.page.keyboard.press("Escape")
    chat.answered()
    assert chat.page.inner_text(".turn .note span") == "Stopped."
    page_server.until(lambda stats: stats.running == 0, "endless")
    said = chat.kept()[0]["turns"][1]
    assert 0 < said["stats"]["tokens"] < 1 << 17
    assert said["stopped"] is True
    assert chat.page.get_attribute("#send", "aria-label") == "Send"


def test_the_button_stops_too(chat: Chat) -> None:
    chat.send("Write for ever", "endless")
    chat.page.wait_for_selector(".turn.assistant.running .md > *")
    chat.page.click("#send.stop")
    chat.answered()
    assert chat.kept()[0]["turns"][1]["stopped"] is True


def test_retry_and_edit(chat: Chat) -> None:
    chat.setting("max_tokens", "8")
    chat.setting("temperature", "1")
    chat.setting("seed", "3")
    first = chat.ask("One", "endless")
    assert chat.page.inner_text(".turn .note span") == "The answer reached its longest length."
    chat.page.click(".turn.assistant [aria-label=Retry]")
    assert chat.answered() == first  # the same seed
    chat.ask("Two")
    assert [turn["role"] for turn in chat.kept()[0]["turns"]] == ["user", "assistant"] * 2
    chat.page.hover(".turn.user >> nth=0")
    chat.page.click(".turn.user >> nth=0 >> [aria-label=Edit]")
    chat.page.fill(".editor textarea", "Another one")
    chat.page.press(".editor textarea", "Enter")
    changed = chat.answered()
    turns = chat.kept()[0]["turns"]
    assert [turn["content"] for turn in turns if turn["role"] == "user"] == ["Another one"]
    assert len(turns) == 2
    assert changed != first
    assert len(turns[0]["branches"]["tails"][0]) == 4


def test_models_can_be_switched_within_a_conversation(chat: Chat) -> None:
    asked: list[dict[str, Any]] = []
    chat.page.on("request", lambda r: asked.append(r.post_data_json) if r.url.endswith("completions") else None)
    chat.setting("max_tokens", "300")
    chat.ask("Tides?", "scripted")
    chat.ask("More", "endless")
    assert [body["model"] for body in asked] == ["scripted", "endless"]
    assert [message["role"] for message in asked[1]["messages"]] == ["user", "assistant", "user"]
    assert [turn.get("model") for turn in chat.kept()[0]["turns"]] == [None, "scripted", None, "endless"]


def test_states_of_models_and_adapters(chat: Chat) -> None:
    listed: list[dict[str, Any]] = [
        {"id": "big", "max_model_len": 8192, "status": {"value": "loaded"}},
        {"id": "big:tone", "max_model_len": 8192, "parent": "big"},
        {"id": "small", "max_model_len": 0, "status": {"value": "unloaded"}},
        {"id": "next", "max_model_len": 0, "status": {"value": "loading"}},
        {"id": "broken", "max_model_len": 0, "status": {"value": "unloaded", "failed": True, "reason": "no such file"}},
    ]
    chat.page.route("**/v1/models", lambda route: route.fulfill(json={"object": "list", "data": listed}))
    chat.page.reload()
    chat.page.wait_for_selector("#model option", state="attached")
    shown = chat.page.locator("#model option").all_text_contents()
    assert shown == ["big", "big:tone · adapter of big", "small · not loaded", "next · loading", "broken · failed"]
    notes = {}
    for name in ("big", "small", "next", "broken"):
        chat.page.select_option("#model", name)
        notes[name] = chat.page.inner_text("#model-note")
    assert notes == {
        "big": "8,192 tokens",
        "small": "loads with your next message",
        "next": "loading",
        "broken": "could not be loaded: no such file",
    }


def test_settings_are_what_is_asked(chat: Chat) -> None:
    asked: list[dict[str, Any]] = []
    chat.page.on("request", lambda r: asked.append(r.post_data_json) if r.url.endswith("completions") else None)
    given = {"system": "Be brief.", "temperature": "0.5", "top_p": "0.9", "max_tokens": "5", "seed": "7", "thinking_token_budget": "64"}
    for name, value in given.items():
        chat.setting(name, value)
    chat.page.select_option("[name=thinking]", "off")
    chat.ask("Hello", "endless")
    body = asked[0]
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (body["temperature"], body["top_p"], body["max_tokens"], body["seed"]) == (0.5, 0.9, 5, 7)
    assert (body["thinking_token_budget"], body["chat_template_kwargs"]) == (64, {"enable_thinking": False})
    chat.page.click("text=Reset to defaults")
    chat.setting("max_tokens", "2")
    chat.ask("Again")
    assert set(asked[1]) == {"model", "messages", "stream", "stream_options", "stop_on_loop", "max_tokens", "temperature"}
    assert asked[1]["temperature"] == 0.7  # of a model without recommended settings


def test_calls_are_shown_and_answered(chat: Chat) -> None:
    chat.page.click("#tune")
    chat.page.click("#settings summary")
    chat.page.fill("[name=tools]", "[nonsense")
    assert "will not be sent" in chat.page.inner_text(".more .wrong")
    chat.page.fill("[name=tools]", json.dumps(TOOLS))
    chat.send("What is the weather in Rome?", "caller")
    chat.page.wait_for_selector(".call")
    assert chat.page.inner_text(".call code") == "weather"
    assert json.loads(chat.page.inner_text(".call pre")) == {"city": "Rome"}
    chat.page.fill(".call textarea", "<tool_response>21</tool_response>")
    chat.page.click("text=Send results")
    chat.page.wait_for_selector("text=It is 21 degrees.")
    assert [turn["role"] for turn in chat.kept()[0]["turns"]] == ["user", "assistant", "tool", "assistant"]


def test_probabilities_of_tokens(chat: Chat) -> None:
    chat.page.click("#tune")
    chat.page.check("[name=logprobs]")
    chat.setting("max_tokens", "12")
    text = chat.ask("Hello", "endless")
    spans = chat.page.locator(".turn.assistant .t")
    assert spans.count() >= 5
    assert "".join(spans.all_text_contents()).split() == text.split()
    spans.nth(2).hover()
    shown = chat.page.locator("#token .row").all_inner_texts()
    assert len(shown) >= 5
    assert chat.page.locator("#token .chosen").count() == 1
    assert all(re.search(r"\d %$", row.strip()) for row in shown)


def test_reload_keeps_conversations(chat: Chat) -> None:
    chat.ask("Tides?", "scripted")
    chat.page.reload()
    chat.page.wait_for_selector("#model option", state="attached")
    assert chat.page.locator(".turn").count() == 2
    assert chat.page.locator(".md td").count() == 2
    chat.page.click("#new")
    assert chat.page.locator(".turn").count() == 0
    chat.ask("Second", "scripted")
    titles = chat.page.locator("#chats .open")
    assert titles.all_inner_texts() == ["Second", "Tides?"]
    titles.nth(1).click()
    assert chat.page.inner_text(".turn.user .text") == "Tides?"


def test_rename_delete_and_export(chat: Chat) -> None:
    chat.ask("Tides?", "scripted")
    chat.page.hover("#chats li")
    chat.page.click("#chats [aria-label^=Rename]")
    chat.page.fill("#chats input", "About <the> Moon")
    chat.page.keyboard.press("Enter")
    assert chat.page.inner_text("#chats .open") == "About <the> Moon"
    with chat.page.expect_download() as saved:
        chat.page.hover("#chats li")
        chat.page.click("#chats [aria-label^=Export]")
    assert saved.value.suggested_filename == "about-the-moon.json"
    with open(saved.value.path(), encoding="utf-8") as file:
        exported = json.load(file)
    assert (exported["title"], exported["turns"][1]["content"]) == ("About <the> Moon", ANSWER)
    chat.page.hover("#chats li")
    chat.page.click("#chats [aria-label^=Delete]")
    assert (chat.kept(), chat.page.locator(".turn").count()) == ([], 0)
    chat.page.click("#toast >> text=Undo")
    assert [one["title"] for one in chat.kept()] == ["About <the> Moon"]
    assert chat.page.locator(".turn").count() == 2


def test_an_answer_goes_on_while_another_conversation_is_open(chat: Chat, page_server: LiveServer) -> None:
    chat.send("Write for ever", "endless")
    chat.page.wait_for_selector(".turn.assistant.running .md > *")
    chat.page.click("#new")
    chat.ask("Tides?", "scripted")
    assert page_server.stats("endless").running == 1
    chat.page.click("#chats >> text=Write for ever")
    chat.page.wait_for_selector(".turn.assistant.running")
    chat.page.keyboard.press("Escape")
    chat.answered()
    assert {chat.kept()[i]["turns"][1].get("stopped") for i in (0, 1)} == {True, None}


def test_keys(chat: Chat) -> None:
    page = chat.page
    page.select_option("#model", "scripted")
    page.click("#prompt")
    page.keyboard.type("One")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("Two")
    page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement.id") == "send"
    page.keyboard.press("Enter")
    chat.answered()
    assert page.inner_text(".turn.user .text") == "One\nTwo"
    page.click("#tune")
    page.keyboard.press("Escape")
    assert page.is_hidden("#settings")
    assert page.evaluate("() => document.activeElement.id") == "tune"
    unnamed = "() => [...document.querySelectorAll('button')].filter((b) => !(b.ariaLabel || b.textContent.trim())).length"
    assert page.evaluate(unnamed) == 0
    nameless = "() => [...document.querySelectorAll('input, select, textarea')].filter((f) => !(f.ariaLabel || f.labels?.length)).length"
    assert page.evaluate(nameless) == 0


def test_a_narrow_dark_window(opened: OpenPage, page_server: LiveServer) -> None:
    light = opened(page_server).page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    chat = opened(page_server, color_scheme="dark")
    page = chat.page
    assert page.evaluate("() => getComputedStyle(document.body).backgroundColor") != light
    page.set_viewport_size({"width": 320, "height": 568})
    chat.ask("Tides?" + " unbreakable" * 20 + "x" * 400, "scripted")
    widths = "() => [document.documentElement, document.getElementById('scroll')].map((e) => e.scrollWidth - e.clientWidth)"
    assert page.evaluate(widths) == [0, 0]
    page.wait_for_selector("#chats", state="hidden")
    page.click("#menu")
    page.wait_for_selector("#chats .open")
    assert page.evaluate("() => document.getElementById('main').inert") is True
    page.keyboard.press("Escape")
    page.wait_for_selector("#chats", state="hidden")
    assert page.evaluate("() => document.activeElement.id") == "menu"
    page.click("#tune")
    assert page.evaluate("() => document.getElementById('settings').getBoundingClientRect().right <= innerWidth")


def test_a_prompt_that_is_too_long(chat: Chat) -> None:
    chat.send("long " * 1000, "short")
    assert re.search(r"too long for the model. It has 5,0\d\d tokens, and the model reads 512", chat.problem())
    assert chat.page.is_visible(".problem >> text=Retry")


def test_a_server_that_is_busy(chat: Chat) -> None:
    error = {"error": {"message": "No room.", "type": "server_error", "param": None, "code": "overloaded"}}
    busy: Any = {"status": 503, "headers": {"Retry-After": "3", "Content-Type": "application/json"}, "body": json.dumps(error)}
    chat.page.route("**/v1/chat/completions", lambda route: route.fulfill(**busy))
    chat.send("Tides?", "scripted")
    assert chat.problem() == "The server cannot answer now. Try again in 3 seconds. It says: No room."
    chat.page.unroute("**/v1/chat/completions")
    chat.page.click(".problem >> text=Retry")
    chat.page.wait_for_selector(".md td")
    assert chat.page.locator(".turn .problem").count() == 0


def test_a_connection_that_breaks(chat: Chat, page_server: LiveServer) -> None:
    chat.send("Write for ever", "endless")
    chat.page.wait_for_selector(".turn.assistant.running .md > *")
    drop_connections(page_server)
    assert chat.problem() == "The server went away before the answer was complete."
    assert chat.answered()  # the received part stays
    chat.page.select_option("#model", "scripted")
    chat.page.click(".problem >> text=Retry")
    chat.page.wait_for_selector(".md td")


def test_a_server_that_goes_away(opened: OpenPage, page_models: dict[str, Callable[[], AsyncLLM]]) -> None:
    with live_server({"endless": page_models["endless"]}) as server:
        chat = opened(server)
        chat.send("Write for ever", "endless")
        chat.page.wait_for_selector(".turn.assistant.running .md > *")
        for _ in range(2):
            server.server.end()
        assert chat.problem() == "The server was stopped before the answer was complete."
    chat.page.click(".problem >> text=Retry")
    chat.page.wait_for_selector("text=The server cannot be reached.")
    assert chat.page.is_visible(".turn .problem >> text=Retry")
    chat.page.wait_for_selector("#banner:not([hidden])", state="attached")
    assert not chat.page.is_visible("#banner")  # the answer has this text already
    assert chat.kept()[0]["turns"][0]["content"] == "Write for ever"


def test_a_server_with_a_key(opened: OpenPage, page_models: dict[str, Callable[[], AsyncLLM]]) -> None:
    with live_server({"scripted": page_models["scripted"]}, api_key=KEY) as server:
        chat = opened(server, open_page=False)
        chat.page.goto(server.url)
        chat.page.wait_for_selector("#key[open]")
        chat.page.fill("#key-value", "another key")
        chat.page.keyboard.press("Enter")
        chat.page.wait_for_selector("#key-wrong:has-text('not this server')")
        chat.page.fill("#key-value", KEY)
        chat.page.keyboard.press("Enter")
        chat.page.wait_for_selector("#model option", state="attached")
        chat.ask("Tides?")
        assert chat.page.locator(".md td").count() == 2
        chat.page.reload()
        chat.page.wait_for_selector("#model option", state="attached")
        assert chat.page.locator("#key[open]").count() == 0
        assert KEY not in json.dumps(chat.page.evaluate("() => ({...localStorage})"))


@pytest.mark.model
def test_a_real_model(opened: OpenPage) -> None:
    with live_server({"smollm2": lambda: AsyncLLM("smollm2")}) as server:
        chat = opened(server)
        chat.setting("temperature", "0")
        chat.setting("max_tokens", "60")
        assert "Paris" in chat.ask("What is the capital of France? Answer in one sentence.")
        chat.page.evaluate(WATCH)
        chat.ask("Tell a story.")
        assert chat.page.evaluate("() => seen.size") > 2  # it arrived in pieces
        assert re.search(r"\d+ tokens · [\d.]+ tokens/s · first after .* prompt tokens", chat.page.inner_text(".meta"))
        chat.page.wait_for_selector(".meter[data-meter=speed] .line[d*=L]", state="attached")
