"""Makes the picture of the page: `mlxinfer serve smollm2 --port 8080`, then `python docs/site/page_picture.py docs/page.png`.

Needs Chromium, and the packages playwright and pillow.
"""

from __future__ import annotations

import io
import shutil
import sys

from PIL import Image
from playwright.sync_api import Page, sync_playwright

QUESTIONS = ("What is the capital of France?", "Name three rivers of Europe.", "Write a short Python function that reverses a string.")
WORD = "idiom"
"""A word of the last answer, whose alternatives are shown."""


def ask(page: Page, question: str) -> None:
    page.click("#new")
    page.fill("#prompt", question)
    page.press("#prompt", "Enter")
    page.wait_for_timeout(700)
    page.wait_for_selector(".turn.assistant:last-child[aria-busy=false]")


def picture(page: Page) -> bytes:
    """A PNG of three greedy conversations with token probabilities."""
    page.wait_for_selector("#model option", state="attached")
    page.click("#tune")
    page.check("[name=logprobs]")
    page.fill("[name=temperature]", "0")
    page.keyboard.press("Escape")
    for question in QUESTIONS:
        ask(page, question)
    page.wait_for_timeout(3500)
    page.locator(".turn.assistant:last-child .t", has_text=WORD).first.hover()
    page.wait_for_timeout(600)
    return page.screenshot()


if __name__ == "__main__":
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"])
        tab = browser.new_context(viewport={"width": 1120, "height": 600}, device_scale_factor=1.5).new_page()
        tab.goto("http://127.0.0.1:8080/")
        Image.open(io.BytesIO(picture(tab))).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(sys.argv[1], optimize=True)
        browser.close()
