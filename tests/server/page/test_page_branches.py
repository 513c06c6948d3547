"""Versions of answers and messages on the page: nothing is lost by a retry or an edit."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.http.chromium import Chat
from support.http.live_server import LiveServer

pytestmark = pytest.mark.long


def contents(chat: Chat) -> list[str]:
    return [turn["content"] for turn in chat.kept()[0]["turns"]]


def three_turns(chat: Chat) -> list[str]:
    chat.setting("max_tokens", "6")
    for text in ("One", "Two", "Three"):
        chat.ask(text, "endless")
    return contents(chat)


def numbers(chat: Chat) -> list[str]:
    return chat.page.locator(".turn .versions span").all_inner_texts()


def edit(chat: Chat, number: int, text: str) -> None:
    chat.page.hover(f".turn.user >> nth={number}")
    chat.page.click(f".turn.user >> nth={number} >> [aria-label=Edit]")
    chat.page.fill(".editor textarea", text)
    chat.page.press(".editor textarea", "Enter")


def test_a_retry_in_the_middle_keeps_what_followed(chat: Chat) -> None:
    page = chat.page
    before = three_turns(chat)
    assert numbers(chat) == []
    page.click(".turn.assistant >> nth=0 >> [aria-label=Retry]")
    chat.answered()
    after = contents(chat)
    assert len(after) == 2
    assert numbers(chat) == ["2/2"]
    assert page.is_disabled("[aria-label='Next version']")
    page.click("[aria-label='Previous version']")
    assert contents(chat) == before
    assert page.locator(".turn").count() == 6
    assert numbers(chat) == ["1/2"]
    assert page.evaluate("() => document.activeElement.getAttribute('aria-label')") == "Next version"
    page.reload()
    page.wait_for_selector("#model option", state="attached")
    assert page.locator(".turn").count() == 6
    page.click("[aria-label='Next version']")
    assert contents(chat) == after
    page.click(".turn.assistant [aria-label=Retry]")
    chat.answered()
    assert numbers(chat) == ["3/3"]


def test_versions_within_versions(chat: Chat) -> None:
    page = chat.page
    before = three_turns(chat)
    edit(chat, 1, "Another one")
    chat.answered()
    page.click(".turn.assistant:last-child [aria-label=Retry]")
    chat.answered()
    inner = contents(chat)
    assert (inner[:2], inner[2]) == (before[:2], "Another one")
    assert numbers(chat) == ["2/2", "2/2"]
    edit(chat, 0, "Anew")
    chat.answered()
    assert numbers(chat) == ["2/2"]
    page.click("[aria-label='Previous version']")
    assert contents(chat) == inner
    page.click(".turn.user [aria-label='Previous version'] >> nth=1")
    assert contents(chat) == before
    assert numbers(chat) == ["1/2", "1/2"]
    page.click("[aria-label='Next version'] >> nth=1")
    assert contents(chat) == inner


def test_a_running_answer_keeps_its_version(chat: Chat, page_server: LiveServer) -> None:
    before = three_turns(chat)
    chat.page.fill("#settings [name=max_tokens]", "")
    edit(chat, 1, "Another one")
    chat.page.wait_for_selector(".turn.assistant.running .md > *")
    chat.page.evaluate("() => document.querySelector('[aria-label=\"Previous version\"]').click()")
    assert numbers(chat) == ["2/2"]
    chat.page.keyboard.press("Escape")
    chat.answered()
    page_server.until(lambda stats: stats.running == 0, "endless")
    chat.page.click("[aria-label='Previous version']")
    assert contents(chat) == before


def test_a_failed_answer_is_replaced(chat: Chat) -> None:
    page = chat.page
    page.route("**/v1/chat/completions", lambda route: route.abort())
    chat.send("Tides?", "scripted")
    chat.problem()
    page.unroute("**/v1/chat/completions")
    page.click(".problem button")
    assert "Tides" in chat.answered()
    assert numbers(chat) == []
    assert "branches" not in chat.kept()[0]["turns"][1]


def test_exported_versions_are_imported(chat: Chat, tmp_path: Path) -> None:
    page = chat.page
    before = three_turns(chat)
    page.click(".turn.assistant >> nth=0 >> [aria-label=Retry]")
    chat.answered()
    after = contents(chat)
    with page.expect_download() as saved:
        page.hover("#chats li")
        page.click("#chats [aria-label^=Export]")
    file = tmp_path / "saved.json"
    saved.value.save_as(file)
    page.evaluate("() => localStorage.clear()")
    with page.expect_file_chooser() as chooser:
        page.click("#import")
    chooser.value.set_files(file)
    page.wait_for_selector("#chats li")
    assert contents(chat) == after
    page.click("[aria-label='Previous version']")
    assert contents(chat) == before
