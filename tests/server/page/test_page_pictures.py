"""Pictures on the page: chosen, pasted and dropped; scaled in the browser; kept with their conversation; refused for text models."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support.http.chromium import Chat, OpenPage
from support.http.live_server import live_server
from support.http.pictures import noise
from support.http.pictures import saved as pictured
from support.models.seeing import GOLDEN

from mlxinfer.engine.async_llm import AsyncLLM

pytestmark = pytest.mark.long

SEES = {"id": "scripted", "max_model_len": 64, "capabilities": ["completion", "tools", "vision"], "status": {"value": "loaded"}}
BLIND = {"id": "endless", "max_model_len": 64, "capabilities": ["completion", "tools"], "status": {"value": "loaded"}}
THUMBS = "#tray .picture img"


def saved(size: tuple[int, int], kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    Image.linear_gradient("L").convert("RGB").resize(size).save(file, kind, **options)
    return file.getvalue()


@pytest.fixture
def seeing(chat: Chat) -> Chat:
    """The page with a model that sees images, and one that does not. Answers are cut off: only what is asked counts."""
    chat.page.route("**/v1/models", lambda route: route.fulfill(json={"object": "list", "data": [SEES, BLIND]}))
    events = [{"choices": [{"index": 0, "delta": {"content": "Seen."}}]}, {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}]
    usage = {"prompt_tokens": 70, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0, "image_tokens": 64}}
    lines = [*(f"data: {json.dumps(event)}\n\n" for event in events), f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"]
    answer: dict[str, Any] = {"headers": {"Content-Type": "text/event-stream"}, "body": "".join(lines) + "data: [DONE]\n\n"}
    chat.page.route("**/v1/chat/completions", lambda route: route.fulfill(**answer))
    reload(chat)
    return chat


def reload(chat: Chat) -> None:
    chat.page.reload()
    chat.page.wait_for_selector("#model option", state="attached")


def choose(chat: Chat, *files: dict[str, Any]) -> None:
    with chat.page.expect_file_chooser() as chooser:
        chat.page.click("#attach")
    chooser.value.set_files(list(files))


def file(data: bytes, mime: str, name: str = "picture") -> dict[str, Any]:
    return {"name": name, "mimeType": mime, "buffer": data}


def asked(chat: Chat) -> list[dict[str, Any]]:
    bodies: list[dict[str, Any]] = []
    chat.page.on("request", lambda r: bodies.append(r.post_data_json) if r.url.endswith("completions") else None)
    return bodies


def pictures(body: dict[str, Any], message: int = 0) -> list[Image.Image]:
    content = body["messages"][message]["content"]
    urls = [part["image_url"]["url"] for part in content if part["type"] == "image_url"]
    return [Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) for url in urls]


def test_a_picture_is_sent_shown_and_kept(seeing: Chat) -> None:
    bodies, png = asked(seeing), saved((40, 30), "PNG")
    assert seeing.page.is_disabled("#send")
    choose(seeing, file(png, "image/png"), file(saved((64, 64), "JPEG"), "image/jpeg"))
    seeing.page.wait_for_selector(THUMBS)
    assert seeing.page.locator("#tray figcaption").all_inner_texts() == ["40 × 30", "64 × 64"]
    assert seeing.page.is_enabled("#send")
    seeing.page.click("#tray .picture >> nth=1 >> [aria-label='Remove the picture']")
    seeing.ask("What is this?", "scripted")
    parts = bodies[0]["messages"][0]["content"]
    assert [part["type"] for part in parts] == ["image_url", "text"]
    assert base64.b64decode(parts[0]["image_url"]["url"].removeprefix("data:image/png;base64,")) == png
    assert seeing.page.is_hidden("#tray")
    assert "64 image tokens" in seeing.page.inner_text(".meta")
    assert "base64" not in json.dumps(seeing.kept())
    reload(seeing)
    seeing.page.wait_for_function("() => document.querySelector('.turn.user .picture img')?.naturalWidth === 40")
    seeing.ask("And now?")
    assert [picture.size for picture in pictures(bodies[1])] == [(40, 30)]


def test_a_large_picture_is_scaled_and_upright(seeing: Chat) -> None:
    bodies, exif = asked(seeing), Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    choose(
        seeing,
        file(saved((3000, 1500), "PNG"), "image/png"),
        file(saved((4096, 1024), "JPEG", exif=exif), "image/jpeg"),
        file(saved((20, 10), "BMP"), "image/bmp"),
    )
    seeing.page.wait_for_function(f"() => document.querySelectorAll('{THUMBS}').length === 3")
    assert seeing.page.locator("#tray figcaption").all_inner_texts() == ["2048 × 1024", "512 × 2048", "20 × 10"]
    seeing.page.press("#prompt", "Enter")  # without text
    seeing.answered()
    sent = pictures(bodies[0])
    assert [(picture.size, picture.format) for picture in sent] == [((2048, 1024), "PNG"), ((512, 2048), "JPEG"), ((20, 10), "PNG")]
    assert sent[1].getexif().get(0x0112, 1) == 1
    assert seeing.page.inner_text("#chats .open") == "Picture"


_GIVE = """([kind, target, bytes]) => {
  const data = new DataTransfer();
  data.items.add(new File([new Uint8Array(bytes)], "x.png", { type: "image/png" }));
  const made = kind === "paste" ? new ClipboardEvent(kind, { clipboardData: data, bubbles: true, cancelable: true })
    : new DragEvent(kind, { dataTransfer: data, bubbles: true, cancelable: true });
  document.querySelector(target).dispatchEvent(made);
  return made.defaultPrevented;
}"""


@pytest.mark.parametrize(("kind", "target"), [("paste", "#prompt"), ("drop", "#transcript")])
def test_pasted_and_dropped_pictures(seeing: Chat, kind: str, target: str) -> None:
    picture = list(saved((8, 6), "PNG"))
    assert seeing.page.evaluate(_GIVE, [kind, target, picture]) is True
    seeing.page.wait_for_selector(THUMBS)
    assert seeing.page.inner_text("#tray figcaption") == "8 × 6"
    seeing.page.select_option("#model", "endless")
    seeing.page.evaluate(_GIVE, [kind, target, picture])
    seeing.page.wait_for_selector("#toast:has-text('endless cannot see pictures.')")
    assert seeing.page.locator(THUMBS).count() == 1


def test_another_file_is_no_picture(seeing: Chat) -> None:
    choose(seeing, file(b"%PDF-1.4", "application/pdf", "a.pdf"), file(b"no picture", "image/png"))
    seeing.page.wait_for_selector("#toast:has-text('a.pdf is neither text nor a picture')")
    assert seeing.page.locator("#tray > *").count() == 0


def test_editing_keeps_the_picture_and_export_has_it(seeing: Chat, tmp_path: Path) -> None:
    bodies = asked(seeing)
    choose(seeing, file(saved((40, 30), "PNG"), "image/png"))
    seeing.page.wait_for_selector(THUMBS)
    seeing.ask("One", "scripted")
    seeing.page.hover(".turn.user")
    seeing.page.click(".turn.user >> [aria-label=Edit]")
    seeing.page.fill(".editor textarea", "Two")
    seeing.page.press(".editor textarea", "Enter")
    seeing.answered()
    assert [picture.size for picture in pictures(bodies[1])] == [(40, 30)]
    with seeing.page.expect_download() as download:
        seeing.page.hover("#chats li")
        seeing.page.click("#chats [aria-label^=Export]")
    path = tmp_path / "saved.json"
    download.value.save_as(path)
    assert [picture.size for picture in pictures(json.loads(path.read_text()))] == [(40, 30)]
    seeing.page.hover("#chats li")
    seeing.page.click("#chats [aria-label^=Delete]")
    reload(seeing)
    count = "() => new Promise((settle) => { const asked = indexedDB.open('mlxinfer', 1); asked.onsuccess = () => { const keys = "
    count += (
        "asked.result.transaction('images').objectStore('images').getAllKeys(); keys.onsuccess = () => settle(keys.result.length); }; })"
    )
    assert seeing.page.evaluate(count) == 0
    with seeing.page.expect_file_chooser() as chooser:
        seeing.page.click("#import")
    chooser.value.set_files(path)
    seeing.page.wait_for_function("() => document.querySelector('.turn.user .picture img')?.naturalWidth === 40")
    reload(seeing)
    seeing.ask("Three")
    assert [picture.size for picture in pictures(bodies[2])] == [(40, 30)]
    seeing.page.click("[aria-label='Previous version']")
    seeing.page.wait_for_function("() => document.querySelector('.turn.user .picture img')?.naturalWidth === 40")
    assert seeing.page.inner_text(".turn.user .text").endswith("One")


def test_a_text_model_shows_the_servers_reason(chat: Chat) -> None:
    chat.page.route("**/v1/models", lambda route: route.fulfill(json={"object": "list", "data": [SEES]}))
    reload(chat)
    choose(chat, file(saved((40, 30), "PNG"), "image/png"))
    chat.page.wait_for_selector(THUMBS)
    chat.send("What is this?", "scripted")
    assert "messages[0].content[0]: the model cannot see images" in chat.problem()


def test_two_pictures_give_two_answers(opened: OpenPage) -> None:
    with live_server({"eyes": lambda: AsyncLLM(GOLDEN / "smolvlm")}) as server:
        chat = opened(server)
        chat.setting("temperature", "0")
        chat.setting("max_tokens", "24")
        answers = []
        for seed in (1, 2, 1):
            chat.page.click("#new")
            choose(chat, file(pictured(noise(seed)), "image/png"))
            chat.page.wait_for_selector(THUMBS)
            answers.append(chat.ask("What is this?"))
            assert "image tokens" in chat.page.inner_text(".meta")
        assert answers[0] == answers[2] != answers[1]
