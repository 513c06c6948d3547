"""Conversations on the page: retries, continued answers, unsent messages, models without chat, files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.http.chromium import Chat, OpenPage
from support.http.live_server import LiveServer

pytestmark = pytest.mark.long


def bodies(chat: Chat) -> list[dict[str, Any]]:
    """Bodies of the requests for answers."""
    asked: list[dict[str, Any]] = []
    chat.page.on("request", lambda r: asked.append(r.post_data_json) if r.url.endswith("completions") else None)
    return asked


def test_a_retry_samples_anew_unless_the_temperature_was_set(chat: Chat) -> None:
    asked = bodies(chat)
    chat.setting("max_tokens", "8")
    chat.setting("seed", "3")
    chat.ask("One", "endless")
    chat.page.click(".turn.assistant [aria-label=Retry]")
    chat.answered()
    assert [(body["temperature"], body.get("seed")) for body in asked] == [(0.7, 3), (0.7, None)]
    chat.setting("temperature", "0")
    chat.page.click(".turn.assistant [aria-label=Retry]")
    chat.answered()
    assert (asked[2]["temperature"], asked[2]["seed"]) == (0, 3)


def test_settings_show_the_models_values(chat: Chat) -> None:
    chat.page.click("#tune")
    shown = {name: chat.page.get_attribute(f"[name={name}]", "placeholder") for name in ("temperature", "top_p", "top_k", "seed")}
    assert shown == {"temperature": "default (0.7)", "top_p": "default (1)", "top_k": "default (0)", "seed": "random"}


def test_reloading_in_an_answer_interrupts_it_and_it_continues(chat: Chat, page_server: LiveServer) -> None:
    chat.send("Write for ever", "endless")
    chat.page.wait_for_selector(".turn.assistant.running .md > *")
    chat.page.reload()
    chat.page.wait_for_selector("#model option", state="attached")
    assert chat.page.inner_text(".turn .note span") == "Interrupted when the page was closed."
    assert chat.page.locator(".problem:visible").count() == 0
    said = chat.kept()[0]["turns"][1]["content"]
    assert said
    asked = bodies(chat)
    chat.setting("max_tokens", "8")
    chat.page.click(".turn .note >> text=Continue")
    chat.page.wait_for_selector(".turn .note:has-text('longest length')")
    turn = chat.kept()[0]["turns"][1]
    assert turn["content"].startswith(said)
    assert len(turn["content"]) > len(said)
    assert "interrupted" not in turn
    assert asked[0]["messages"][-1] == {"role": "assistant", "content": said}
    assert asked[0]["continue_final_message"] is True
    page_server.until(lambda stats: stats.running == 0, "endless")


def reload(chat: Chat) -> None:
    chat.page.reload()
    chat.page.wait_for_selector("#model option", state="attached")


def test_unsent_messages_are_kept_for_each_conversation(chat: Chat) -> None:
    page = chat.page
    page.fill("#prompt", "not yet said")
    reload(chat)
    assert page.input_value("#prompt") == "not yet said"
    page.click("#new")
    assert page.input_value("#prompt") == "not yet said"  # there was no conversation yet
    page.fill("#prompt", "")
    chat.ask("Tides?", "scripted")
    page.fill("#prompt", "half a question")
    page.click("#new")
    assert page.input_value("#prompt") == ""
    page.fill("#prompt", "another")
    page.click("#chats .open")
    assert page.input_value("#prompt") == "half a question"
    reload(chat)
    assert page.input_value("#prompt") == "half a question"
    page.press("#prompt", "Enter")
    chat.answered()
    reload(chat)
    assert page.input_value("#prompt") == ""


def test_models_that_cannot_chat_are_told_apart(chat: Chat) -> None:
    listed: list[dict[str, Any]] = [
        {"id": "base", "max_model_len": 64, "capabilities": ["completion"], "status": {"value": "loaded"}},
        {"id": "vectors", "max_model_len": 64, "capabilities": ["embedding"], "status": {"value": "loaded"}},
        {"id": "able", "max_model_len": 64, "capabilities": ["completion", "tools"], "status": {"value": "loaded"}},
    ]
    chat.page.route("**/v1/models", lambda route: route.fulfill(json={"object": "list", "data": listed}))
    reload(chat)
    shown = chat.page.locator("#model option").all_text_contents()
    assert shown == ["able", "base · base model", "vectors · embedding model"]
    assert chat.page.input_value("#model") == "able"
    chat.page.fill("#prompt", "Hello")
    assert chat.page.is_enabled("#send")
    chat.page.select_option("#model", "base")
    assert chat.page.inner_text("#model-note") == "continues texts and cannot chat: it has no chat template"
    assert chat.page.is_disabled("#send")


def test_what_was_exported_can_be_imported(chat: Chat, tmp_path: Path) -> None:
    page = chat.page
    chat.setting("system", "Be brief.")
    chat.ask("Tides?", "scripted")
    with page.expect_download() as saved:
        page.hover("#chats li")
        page.click("#chats [aria-label^=Export]")
    file = tmp_path / "saved.json"
    saved.value.save_as(file)
    exported = json.loads(file.read_text())
    assert [message["role"] for message in exported["messages"]] == ["system", "user", "assistant"]
    plain = tmp_path / "plain.json"
    plain.write_text(json.dumps({"messages": exported["messages"]}))
    broken = tmp_path / "broken.json"
    broken.write_text("[1]")
    for path, count in ((file, 2), (plain, 3), (broken, 3)):
        with page.expect_file_chooser() as chooser:
            page.click("#import")
        chooser.value.set_files(path)
        page.wait_for_function(f"() => document.querySelectorAll('#chats li').length === {count}")
        assert page.locator(".turn .md td").count() == 2
        assert page.input_value("#settings [name=system]") == "Be brief."
    page.wait_for_selector("#toast:has-text('no conversation')")


def test_inputs_are_laid_out_by_their_text(chat: Chat) -> None:
    hebrew = "\u05e9\u05dc\u05d5\u05dd hello"
    chat.page.fill("#prompt", hebrew)
    assert chat.page.evaluate("() => document.getElementById('prompt').matches(':dir(rtl)')")
    chat.ask(hebrew, "scripted")
    assert chat.page.evaluate("() => document.querySelector('.turn.user .text').matches(':dir(rtl)')")
    assert chat.page.evaluate("() => document.querySelector('#chats .open').matches(':dir(rtl)')")
    assert chat.page.evaluate("() => document.querySelector('.turn.assistant .md p').matches(':dir(ltr)')")


def test_the_list_is_searched(chat: Chat) -> None:
    page = chat.page
    assert page.is_hidden("#find")
    for text in ("The moon, \u05e9\u05dc\u05d5\u05dd", "The sun"):
        page.click("#new")
        chat.ask(text, "scripted")
    listed = page.locator("#chats .open")
    for words, found in (
        ("MOON", ["The moon, \u05e9\u05dc\u05d5\u05dd"]),
        ("fundy the su", ["The sun"]),
        ("\u05e9\u05dc\u05d5\u05dd", 1),
        ("the", 2),
    ):
        page.fill("#find", words)
        assert (listed.count() if isinstance(found, int) else listed.all_inner_texts()) == found
    page.fill("#find", "jupiter")
    assert page.inner_text("#chats") == "No conversation has these words."
    page.press("#find", "Escape")
    assert (page.input_value("#find"), listed.count()) == ("", 2)


def test_light_and_dark(opened: OpenPage, page_server: LiveServer) -> None:
    page = opened(page_server, color_scheme="dark").page
    color = "() => getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(color)
    page.click("[aria-label='Switch to light']")
    light = page.evaluate(color)
    assert sum(map(int, re.findall(r"\d+", light))) > 700 > 200 > sum(map(int, re.findall(r"\d+", dark)))
    page.reload()
    page.wait_for_selector("#model option", state="attached")
    assert page.evaluate(color) == light
    page.emulate_media(color_scheme="light")
    assert page.evaluate(color) == light
    page.click("[aria-label='Switch to dark']")
    assert page.evaluate(color) == dark
    page.click("[aria-label='Switch to light']")
    page.emulate_media(color_scheme="dark")  # the system is followed again
    assert page.evaluate(color) == dark


def test_long_messages_are_folded(chat: Chat) -> None:
    long = "word " * 2000
    chat.ask(long, "scripted")
    assert chat.page.locator(".turn.user .text").bounding_box()["height"] < 300
    chat.page.click("text=Show all 2,000 words")
    assert chat.page.locator(".turn.user .text").bounding_box()["height"] > 600
    assert chat.page.inner_text(".turn.user .text").count("word") == 2000
    assert chat.kept()[0]["turns"][0]["content"] == long.strip()
