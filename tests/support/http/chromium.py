"""Headless Chromium, driven by Playwright. Tests are skipped if one of them is not installed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome")
_HOW = "pip install playwright; Debian: apt install chromium"
ANSWER = """## Tides

| Place | Range |
| --- | ---: |
| Fundy | 16.3 m |

```python
print("<b>&</b>")
```

**Done**, see [this](https://example.org/x)."""
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
"""Answers of the scripted models in the page's tests."""


@contextmanager
def chromium() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason=f"playwright is not installed ({_HOW})")
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        pytest.skip(f"there is no Chromium ({_HOW})")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


class Chat:
    """The page of a server in a separate browser context, and a person's actions on it. An error logged by the page fails the test."""

    def __init__(self, browser: Any, url: str, *, open_page: bool = True, **options: Any) -> None:
        self.context = browser.new_context(viewport={"width": 1200, "height": 800}, accept_downloads=True, **options)
        self.context.set_default_timeout(20_000)
        self.page = self.context.new_page()
        self.errors: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda line: self._logged(line))
        if open_page:
            self.page.goto(url)
            self.page.wait_for_selector("#model option", state="attached")

    def _logged(self, line: Any) -> None:
        if line.type == "error" and "Failed to load resource" not in line.text:
            self.errors.append(line.text)

    def send(self, text: str, model: str = "") -> None:
        """Write a message, for this model, and send it with Enter."""
        if model:
            self.page.select_option("#model", model)
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")

    def ask(self, text: str, model: str = "") -> str:
        """Send a message, and return the text of the complete answer."""
        self.send(text, model)
        return self.answered()

    def answered(self) -> str:
        """The text of the last answer, once it is complete."""
        self.page.wait_for_selector(".turn.assistant:last-child[aria-busy=false]")
        return str(self.page.inner_text(".turn.assistant:last-child > .md"))

    def problem(self) -> str:
        """The text shown for a failed answer."""
        self.page.wait_for_selector(".turn .problem")
        return str(self.page.inner_text(".turn .problem p"))

    def kept(self) -> list[dict[str, Any]]:
        """The conversations in the browser's storage."""
        entries: dict[str, str] = self.page.evaluate("() => ({...localStorage})")
        return [json.loads(value) for key, value in entries.items() if key.startswith("mlxinfer.chat.")]

    def setting(self, name: str, value: str) -> None:
        """Fill in a setting; the panel stays open."""
        if self.page.is_hidden("#settings"):
            self.page.click("#tune")
        self.page.fill(f"#settings [name={name}]", value)


OpenPage = Callable[..., Chat]
"""Opens the page of a server."""
