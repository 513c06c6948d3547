"""The page's files: size, policy and access; and the option that opens the page."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
from support.hostile.cases import request
from support.http.live_server import LiveServer, live_server

from mlxinfer.cli import main
from mlxinfer.engine.async_llm import AsyncLLM
from mlxinfer.server import log
from mlxinfer.server.page.files import FOLDER, PATHS
from mlxinfer.server.process import open_page, page_url
from mlxinfer.server.settings import ServerSettings

KEY = "a key of the test"
MOST_BYTES = 120_000
MOST_LIBRARY_BYTES = 350_000
FILES = sorted(path for path in FOLDER.iterdir() if path.is_file())
VENDOR = FOLDER / "vendor"
SCRIPTS = [path for path in FILES if path.suffix == ".js"]
HTML = "Accept: text/html,application/xhtml+xml"


def get(path: str, *lines: str, host: str = "localhost", method: str = "GET") -> bytes:
    return request(path, b"", *lines, method=method, host=host)


@pytest.fixture(scope="module")
def locked(tiny_path: Path) -> Iterator[LiveServer]:
    with live_server({"tiny": lambda: AsyncLLM(tiny_path)}, api_key=KEY) as server:
        yield server


def test_the_page_is_small() -> None:
    assert 10_000 < sum(path.stat().st_size for path in FILES) < MOST_BYTES
    assert 10_000 < sum(path.stat().st_size for path in VENDOR.iterdir()) < MOST_LIBRARY_BYTES


def test_libraries_come_with_their_licences(live: LiveServer) -> None:
    told = (VENDOR / "README.md").read_text()
    for path in VENDOR.glob("*.*s"):
        assert f"`{path.name}`" in told
        assert (VENDOR / f"LICENSE.{path.stem}").stat().st_size > 500
    assert "url(" not in (VENDOR / "temml.css").read_text()
    assert live.exchange(get("/page/vendor/README.md", HTML))[0] == 404


def test_everything_comes_from_this_server() -> None:
    index = (FOLDER / "index.html").read_text()
    referred = re.findall(r'(?:src|href)="([^"#][^"]*)"', index)
    imported = [found for path in SCRIPTS for found in re.findall(r'(?:from |import\()"([^"]+)"', path.read_text())]
    referred += re.findall(r'href: "(page/vendor/[^"]+)"', (FOLDER / "rich.js").read_text())
    assert {f"/{name}" for name in referred} | {f"/page/{name.removeprefix('./')}" for name in imported} == PATHS - {"/"}
    for path in FILES:
        named = set(re.findall(r"https?://[\w.]+", path.read_text())) - {"http://www.w3.org"}
        assert not named, path.name
    assert "@import" not in (FOLDER / "style.css").read_text()
    assert "url(" not in (FOLDER / "style.css").read_text()


def test_nothing_is_inline_and_nothing_parses_html() -> None:
    index = (FOLDER / "index.html").read_text()
    assert not re.findall(r"<style|\sstyle=|\son\w+=|javascript:|<script(?![^>]*\ssrc=)", index)
    for path in SCRIPTS:
        assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser", path.read_text())


@pytest.mark.parametrize("unix", [False, True], ids=["tcp", "unix"])
def test_the_page_and_its_headers(live: LiveServer, unix: bool) -> None:
    for path in sorted(PATHS):
        status, headers, body = live.exchange(get(path, HTML), unix=unix)
        assert status == 200
        name = "index.html" if path == "/" else path.removeprefix("/page/")
        assert body == (FOLDER / name).read_bytes()
        policy = {part.split()[0]: part.split()[1:] for part in headers["content-security-policy"].split("; ")}
        assert policy["default-src"] == ["'none'"]
        assert {source for name, sources in policy.items() if name.endswith("-src") for source in sources} == {"'none'", "'self'", "blob:"}
        assert policy["img-src"] == ["'self'", "blob:"]
        assert "blob:" not in policy["script-src"] + policy["connect-src"]
        assert policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == ["'none'"]
        assert policy["require-trusted-types-for"] == ["'script'"]
        assert (headers["x-content-type-options"], headers["cache-control"]) == ("nosniff", "no-cache")
        assert headers["content-type"].split(";")[0] in ("text/html", "text/css", "text/javascript", "image/svg+xml")


def test_a_browser_that_has_it_gets_no_second_copy(live: LiveServer) -> None:
    for path in ("/", "/page/app.js"):
        _, headers, body = live.exchange(get(path, HTML))
        for known in (headers["etag"], f'"other", W/{headers["etag"]}', "*"):
            status, again, nothing = live.exchange(get(path, HTML, f"If-None-Match: {known}"))
            assert (status, nothing, again["etag"]) == (304, b"", headers["etag"])
            assert "content-security-policy" in again
        assert live.exchange(get(path, HTML, 'If-None-Match: "other"'))[2] == body


def test_only_the_headers_are_sent_for_head(live: LiveServer) -> None:
    for path in ("/", "/page/style.css"):
        status, headers, body = live.exchange(get(path, HTML))
        with live.connect(unix=False) as connection:
            connection.sendall(get(path, HTML, "Connection: close", method="HEAD"))
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 200")
        assert answer.endswith(b"\r\n\r\n")
        assert f"content-length: {len(body)}".encode() in answer
        assert status == 200
        assert headers["content-length"] == str(len(body))
    assert live.exchange(get("/page/app.js", method="POST"))[0] == 405


@pytest.mark.parametrize(
    "path", ["/page", "/page/", "/page/index.html", "/page/../app.py", "/page/%2e%2e/app.py", "/page/files.py", "/page/x.js"]
)
def test_nothing_else_is_served(live: LiveServer, path: str) -> None:
    assert live.exchange(get(path, HTML))[0] == 404


def test_other_clients_get_what_they_look_for_at_the_root(live: LiveServer) -> None:
    for accept in ("Accept: */*", "Accept: application/json", "X-Nothing: 1"):
        assert live.exchange(get("/", accept))[2] == b"Ollama is running"
    assert live.exchange(get("/", HTML))[1]["vary"] == "accept"


def test_the_guard_holds(live: LiveServer) -> None:
    for path in ("/", "/page/app.js"):
        assert live.exchange(get(path, HTML, host="evil.example"))[0] == 403
        assert live.exchange(get(path, HTML, "Origin: http://evil.example"))[0] == 403
        assert live.exchange(get(path, HTML, host="localhost:80"))[0] == 200


def test_a_key_is_for_what_the_page_asks_not_for_the_page(locked: LiveServer) -> None:
    for path in PATHS:
        assert locked.exchange(get(path, HTML))[0] == 200
        assert locked.exchange(get(path, HTML, host="evil.example"))[0] == 403
    for path in ("/v1/models", "/metrics", "/page/x.js"):
        assert locked.exchange(get(path, HTML))[0] == 401


def test_its_requests_are_logged_by_their_path(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[dict[str, Any]] = []
    monkeypatch.setattr(log, "access", lines.append)
    live.exchange(get("/page/app.js?secret=1"))
    live.until(lambda stats: bool(lines))
    assert (lines[0]["route"], lines[0]["status"]) == ("/page/app.js", 200)


def test_what_the_plots_show_is_measured(live: LiveServer) -> None:
    text = live.exchange(get("/metrics"))[2].decode()
    found = dict(re.findall(r"^mlxinfer_(memory_bytes|memory_limit_bytes|kv_cache_pages)(?:\{.*\})? (\S+)$", text, re.MULTILINE))
    assert 1e6 < float(found["memory_bytes"]) < 1e12
    assert float(found["memory_limit_bytes"]) > 1e8
    assert float(found["kv_cache_pages"]) == live.stats().pages > 0
    assert "mlxinfer_inter_token_latency_seconds_count" in text


@pytest.mark.parametrize(
    ("options", "host", "opens"),
    [
        (["--open"], "127.0.0.1", True),
        (["--open", "--port", "81"], "127.0.0.1", True),
        (["--open", "--host", "::1"], "::1", True),
        ([], None, False),
    ],
)
def test_the_option_listens_on_tcp(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], host: str | None, opens: bool
) -> None:
    started: list[Any] = []
    monkeypatch.setattr("mlxinfer.server.process.run", lambda *arguments, **named: started.extend(arguments))
    with pytest.raises(SystemExit) as ended:
        main(["serve", f"tiny={tiny_path}", "--socket", "/tmp/never.sock", *options])
    assert ended.value.code == 0
    (settings,) = [each for each in started if isinstance(each, ServerSettings)]
    assert (settings.host, settings.opens_page) == (host, opens)


def test_the_page_is_opened_when_the_server_listens(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: Queue[str] = Queue()
    monkeypatch.setattr("webbrowser.open", lambda url: opened.put(url) is None)
    with live_server({"tiny": lambda: AsyncLLM(tiny_path)}, opens_page=True) as server:
        assert opened.get(timeout=60) == f"{server.url}/"
        assert server.exchange(get("/", HTML))[0] == 200


def test_the_browser_gets_the_address_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    notes: list[str] = []
    monkeypatch.setattr("mlxinfer.server.process.notice", notes.append)

    def failing(url: str) -> bool:
        raise OSError

    with socket.socket(socket.AF_UNIX) as unix, socket.socket() as own, socket.socket() as everywhere:
        own.bind(("127.0.0.1", 0))
        everywhere.bind(("0.0.0.0", 0))
        here = f"http://127.0.0.1:{own.getsockname()[1]}/"
        assert page_url([unix, own]) == here
        assert page_url([everywhere]) == f"http://127.0.0.1:{everywhere.getsockname()[1]}/"
        open_page([unix, own], lambda url: not asked.append(url)).join()
        assert (asked, notes) == ([here], [])
        open_page([own], lambda url: False).join()
        open_page([own], failing).join()
        assert notes == [f"no browser could be opened: the page is at {here}"] * 2
        open_page([unix], asked.append).join()
        assert "TCP" in notes[-1]
        assert asked == [here]
