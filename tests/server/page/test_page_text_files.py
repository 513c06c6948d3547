"""Text files attached to messages on the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.http.chromium import Chat

from mlxinfer.cli.repl.attachments import file_block

pytestmark = pytest.mark.long

NOTES = "# Notes\n\n```\ncode\n```\nend\n"
GIVE = """([kind, target, name, text]) => {
  const data = new DataTransfer();
  data.items.add(new File([text], name, { type: "text/plain" }));
  const options = { bubbles: true, cancelable: true };
  const event = kind === "drop" ? new DragEvent("drop", { ...options, dataTransfer: data })
    : new ClipboardEvent("paste", { ...options, clipboardData: data });
  document.querySelector(target).dispatchEvent(event);
}"""


def choose(chat: Chat, **files: bytes) -> None:
    with chat.page.expect_file_chooser() as chooser:
        chat.page.click("#attach")
    named = [(name.replace("_", "."), data) for name, data in files.items()]
    chooser.value.set_files([{"name": name, "mimeType": "", "buffer": data} for name, data in named])


def test_a_text_file_is_sent_as_the_terminal_sends_it(chat: Chat, tmp_path: Path) -> None:
    page = chat.page
    asked: list[dict[str, Any]] = []
    page.on("request", lambda r: asked.append(r.post_data_json) if r.url.endswith("completions") else None)
    choose(chat, notes_md=NOTES.encode(), data_csv=b"a,b\r\n1,2\r\n")
    page.wait_for_selector("#tray .file >> nth=1")
    assert page.locator("#tray summary").all_inner_texts() == ["notes.md\n6 lines", "data.csv\n2 lines"]
    page.click("[aria-label='Remove data.csv']")
    assert page.locator("#tray .file").count() == 1
    chat.ask("What do they say?", "scripted")
    (tmp_path / "notes.md").write_text(NOTES)
    block, _ = file_block(tmp_path / "notes.md")
    assert asked[0]["messages"] == [{"role": "user", "content": f"What do they say?\n\n{block}"}]
    assert page.is_hidden("#tray")
    assert page.locator(".turn.user pre").is_hidden()
    page.click(".turn.user summary")
    page.wait_for_selector(".turn.user pre:has-text('end')")
    assert page.text_content(".turn.user pre") == NOTES
    page.hover(".turn.user")
    page.click(".turn.user [aria-label=Edit]")
    page.fill(".editor textarea", "And now?")
    page.press(".editor textarea", "Enter")
    chat.answered()
    assert asked[1]["messages"][0]["content"] == f"And now?\n\n{block}"


@pytest.mark.parametrize(("kind", "target"), [("paste", "#prompt"), ("drop", "#transcript")])
def test_dropped_and_pasted_text(chat: Chat, kind: str, target: str, tmp_path: Path) -> None:
    page = chat.page
    page.evaluate(GIVE, [kind, target, "a.txt", "the whale"])
    page.wait_for_selector("#tray .file")
    assert page.is_enabled("#send")  # a file alone is a message
    page.press("#prompt", "Enter")
    chat.answered()
    assert chat.kept()[0]["turns"][0]["files"] == [{"name": "a.txt", "text": "the whale"}]
    assert page.inner_text("#chats .open") == "a.txt"
    for words, count in (("whale", 1), ("a.txt", 1), ("walrus", 0)):
        page.fill("#find", words)
        assert page.locator("#chats .open").count() == count
    page.fill("#find", "")
    with page.expect_download() as saved:
        page.hover("#chats li")
        page.click("#chats [aria-label^=Export]")
    file = tmp_path / "saved.json"
    saved.value.save_as(file)
    assert "the whale" in json.loads(file.read_text())["messages"][0]["content"]
    page.evaluate("() => localStorage.clear()")
    with page.expect_file_chooser() as chooser:
        page.click("#import")
    chooser.value.set_files(file)
    page.wait_for_selector("#chats li")
    assert chat.kept()[0]["turns"][0]["files"] == [{"name": "a.txt", "text": "the whale"}]


def test_what_is_no_text_is_refused(chat: Chat) -> None:
    page = chat.page
    for data, told in ((bytes(range(256)), "x.bin is neither text nor a picture"), (b"a" * 1_000_001, "x.bin is too large")):
        choose(chat, x_bin=data)
        page.wait_for_selector(f"#toast:has-text('{told}')")
    assert page.is_hidden("#tray")
