"""A server reads prompts for another server, which fetches the pages: answers are the same, and damaged replies are rejected."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from support.http.live_server import live_server
from support.models.tiny_directory import tiny_directory

from mlxinfer import LLM, AsyncLLM, SamplingParams
from mlxinfer.cache.disk import remote as peer
from mlxinfer.cache.disk.remote import PAGES, PREFILL, PeerStorage
from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.cache.paged import PagedCache
from mlxinfer.config import EngineArgs
from mlxinfer.errors import SettingError
from mlxinfer.loading.find.fingerprint import content_digest, content_fingerprint

PROMPT = [(i * 7) % 90 + 3 for i in range(700)]
GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=20, temperature=0.9, seed=5, ignore_eos=True)
SETTINGS: dict[str, Any] = {"dtype": "float32", "memory_gb": 2, "max_context": 1024}


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXINFER_HOME", str(tmp_path_factory.mktemp("home")))


@contextmanager
def producer(path: Path, *, kv_producer: bool = True, kv: str = "16", context: int = 1024, **settings: Any) -> Iterator[str]:
    """The URL of a server that has a copy of the model."""
    copy = Path(shutil.copytree(path, path.parent / "copy", dirs_exist_ok=True))
    with live_server(
        {"tiny": lambda: AsyncLLM(copy, kv_producer=kv_producer, kv=kv, **SETTINGS | {"max_context": context})}, **settings
    ) as server:
        yield server.url


def source(llm: LLM) -> PeerStorage:
    storage = llm.engine.cache._storage
    assert isinstance(storage, PeerStorage)
    return storage


def alone(path: Path, kv: str = "16", params: SamplingParams = GREEDY) -> list[int]:
    with LLM(path, kv=kv, **SETTINGS) as llm:
        return list(llm.generate(PROMPT, params)[0].token_ids)


@pytest.mark.parametrize(("name", "kv"), [("llama", "16"), ("llama", "4"), ("gemma3_text", "16"), ("qwen3_next", "4")])
def test_answers_are_the_same(name: str, kv: str, tmp_path: Path) -> None:
    """Full pages, windows and recurrent states, with and without quantization. Only the last token is computed locally."""
    path = tiny_directory(tmp_path / "tiny", name, eos=False, context=2048)
    with producer(path, kv=kv) as url, LLM(path, kv=kv, prefill_from=url, **SETTINGS) as llm:
        for params in (SEEDED, GREEDY):
            assert list(llm.generate(PROMPT, params)[0].token_ids) == alone(path, kv, params)
        assert llm.stats().reused_tokens == 2 * (len(PROMPT) - 1)
        assert source(llm).note == ""


def test_what_is_moved_is_little_more_than_it_must_be(tmp_path: Path) -> None:
    """Transferred are keys and values of all tokens but the last, and a header per page. The second request transfers nothing."""
    path = tiny_directory(tmp_path / "tiny", eos=False, context=2048)
    with producer(path) as url, LLM(path, prefill_from=url, **SETTINGS) as llm:
        llm.generate(PROMPT, GREEDY)
        bound = PagedCache.token_bytes(llm.engine.model.layers, mx.float32, KVFormat()) * (len(PROMPT) - 1)
        moved = source(llm).received_bytes
        assert bound < moved < 1.05 * bound
        llm.generate([*PROMPT, 5], GREEDY)
        llm.generate(PROMPT[::-1][:200], GREEDY)  # too short for a request to the other server
        assert source(llm).received_bytes == moved


def test_a_prompt_that_is_too_long_there_is_read_here(tmp_path: Path) -> None:
    """The next prompt is read remotely all the same."""
    path = tiny_directory(tmp_path / "tiny", eos=False, context=2048)
    with producer(path, context=500) as url, LLM(path, prefill_from=url, **SETTINGS) as llm:
        assert list(llm.generate(PROMPT, GREEDY)[0].token_ids) == alone(path)
        assert (source(llm).note, llm.stats().reused_tokens) == ("", 0)
        llm.generate(PROMPT[1:400], GREEDY)
        assert llm.stats().reused_tokens == 398


class Liar(BaseHTTPRequestHandler):
    """Forwards requests to a real server, and changes its answers."""

    there, lie = "", ""
    asked, gone = threading.Event(), threading.Event()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.asked.set()
        if self.lie == "waits":
            self.gone.wait(60)
        if self.lie == "dies" or (self.lie == "dies later" and self.path == PAGES):
            self.connection.close()
            return
        connection = HTTPConnection(self.there, timeout=60)
        connection.request("POST", self.path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        content = bytearray(answer.read())
        connection.close()
        if self.lie == ("nested" if self.path == PREFILL else "nested error"):
            answer.status, content = 200 if self.path == PREFILL else 500, bytearray(b"[" * 10_000)
        if self.path == PREFILL and self.lie in ("no JSON", "no names"):
            content = bytearray(b"{" if self.lie == "no JSON" else b'{"pages": ["../../etc/passwd", 7, "aa-bb-full"]}')
        if self.path == PAGES and self.lie == "cut":
            content = content[: len(content) // 2]
        if self.path == PAGES and self.lie == "one bit":
            content[len(content) // 2] ^= 1
        if self.path == PAGES and self.lie == "refuses pages":
            answer.status, content = 400, bytearray(b"no")
        if self.path == PAGES and self.lie == "other shapes":
            content = content.replace(b'"shape":[2,', b'"shape":[1,')
        self.send_response(answer.status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        if self.path == PAGES and self.lie == "drips":
            with suppress(OSError):
                for at in range(len(content)):
                    self.wfile.write(content[at : at + 1])
                    self.gone.wait(0.01)
        else:
            self.wfile.write(content)

    def log_message(self, *about: Any) -> None:
        pass


LIES = {"no JSON": 0, "no names": 0, "dies": 0, "dies later": 0, "cut": 256, "one bit": 256, "other shapes": 0}
LIES |= {"nested": 0, "nested error": 0, "refuses pages": 0, "drips": 0}
"""Tokens that the damaged answer still contains; pages before the fault are accepted."""
QUIET = ("no names", "cut")
"""Lies that are not logged: the pages could have been evicted meanwhile."""


@pytest.mark.timeout(180)  # after an unexpected fault the request would wait for ever
def test_who_lies_or_dies_costs_a_recomputation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_directory(tmp_path / "tiny", eos=False, context=2048)
    expected = alone(path)
    with producer(path) as url, ThreadingHTTPServer(("127.0.0.1", 0), Liar) as liar:
        threading.Thread(target=liar.serve_forever, daemon=True).start()
        Liar.there = url.removeprefix("http://")
        for lie, least in LIES.items():
            Liar.lie = lie
            if lie == "drips":
                monkeypatch.setattr(peer, "_PATIENCE_S", 0.5)
            with LLM(path, prefill_from=f"http://127.0.0.1:{liar.server_port}", **SETTINGS) as llm:
                answer = llm.generate(PROMPT, GREEDY)[0]
                assert list(answer.token_ids) == expected, lie
                assert least <= answer.usage.stats.reused_tokens < len(PROMPT) - 1, lie
                end = time.monotonic() + 10
                while lie not in QUIET and not source(llm).note:
                    assert time.monotonic() < end, lie
                assert lie not in QUIET or source(llm).note == "", lie
        liar.shutdown()


def test_nobody_waits_for_another_one_s_prompt(tmp_path: Path) -> None:
    path = tiny_directory(tmp_path / "tiny", eos=False, context=2048)

    async def both(url: str) -> None:
        async with AsyncLLM(path, prefill_from=url, **SETTINGS) as llm:
            long = asyncio.create_task(llm.generate(PROMPT, GREEDY))
            assert await asyncio.to_thread(Liar.asked.wait, 20)
            short = asyncio.create_task(llm.generate(PROMPT[:20], GREEDY))
            await asyncio.wait([short], timeout=10)
            assert (short.done(), long.done()) == (True, False)
            Liar.gone.set()
            assert (await long)[0].usage.stats.reused_tokens == len(PROMPT) - 1

    Liar.lie, Liar.asked, Liar.gone = "waits", threading.Event(), threading.Event()
    with producer(path) as url, ThreadingHTTPServer(("127.0.0.1", 0), Liar) as there:
        threading.Thread(target=there.serve_forever, daemon=True).start()
        Liar.there = url.removeprefix("http://")
        asyncio.run(both(f"http://127.0.0.1:{there.server_port}"))
        there.shutdown()


def test_what_comes_for_somebody_who_has_gone_is_stored(tmp_path: Path) -> None:
    """Pages that arrive after their request was cancelled are stored; until then, steps wait for each other."""
    path = tiny_directory(tmp_path / "tiny", eos=False, context=2048)
    with producer(path) as url, LLM(path, prefill_from=url, **SETTINGS) as llm:
        tier, cache = source(llm), llm.engine.cache
        end = time.monotonic() + 20
        while tier._reading or not tier.arrived:
            cache.prefetch(PROMPT[:-1], store=False)
            cache.wait(0.01)
            assert time.monotonic() < end
        llm.generate(PROMPT[:20], GREEDY)
        assert not tier.arrived
        assert cache.find(PROMPT).reused >= 640


def noted(path: Path, url: str) -> str:
    """The log's reason for not using a server."""
    with LLM(path, prefill_from=url, **SETTINGS) as llm:
        assert len(llm.generate(PROMPT, GREEDY)[0].token_ids) == 20
        return source(llm).note


def test_who_may_not_or_cannot_is_told_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_directory(tmp_path / "tiny", eos=False, context=2048)
    other = tiny_directory(tmp_path / "other" / "tiny", eos=False, context=4096)
    assert "prompts are read here, not at http://127.0.0.1:1: " in noted(path, "http://127.0.0.1:1")
    with producer(path, kv_producer=False) as url:
        assert "403" in (note := noted(path, url))
        assert "--kv-producer" in note
    with producer(path, api_key="a secret") as url:
        assert "401" in noted(path, url)
        monkeypatch.setenv("MLXINFER_PREFILL_API_KEY", "a secret")
        assert "404" in (note := noted(other, url))
        assert "No model that is loaded here computes the same" in note
        assert noted(path, url) == ""


@pytest.mark.parametrize("url", ["studio.local:8080", "ftp://studio.local", "http://", "http://a/b", "http://a:x", "http://me:word@a", 7])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(SettingError, match="is no address such as"):
        EngineArgs("tiny", prefill_from=url)


def test_what_excludes_it_is_told() -> None:
    with pytest.raises(SettingError, match="leave out prefix_disk_gb"):
        EngineArgs("tiny", prefill_from="http://a", prefix_disk_gb=1.0)
    with pytest.raises(SettingError, match="or reads those of others, not both"):
        EngineArgs("tiny", prefill_from="http://a", kv_producer=True)
    with pytest.raises(SettingError, match="kv_producer needs the prefix cache"):
        EngineArgs("tiny", kv_producer=True, prefix_cache=False)


def test_an_address_without_a_port_has_its_scheme_s() -> None:
    assert PeerStorage("http://[::1]")._address == ("::1", 80)
    assert PeerStorage("https://studio.local")._address == ("studio.local", 443)
    assert PeerStorage("http://studio.local:8080")._address == ("studio.local", 8080)


def test_copies_of_a_model_are_called_the_same(tmp_path: Path) -> None:
    path = tiny_directory(tmp_path / "tiny")
    copy = Path(shutil.copytree(path, tmp_path / "copy", copy_function=shutil.copyfile))
    assert content_fingerprint(path, 1) == content_fingerprint(copy, 1) != content_fingerprint(path, 2)
    weights = copy / "model.safetensors"
    before = content_digest(weights)
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert content_digest(weights) != before
    assert content_fingerprint(path) != content_fingerprint(copy)


def test_the_hub_has_hashed_its_files(tmp_path: Path) -> None:
    """The files are not read again."""
    (tmp_path / "blobs").mkdir()
    blob = tmp_path / "blobs" / ("0123456789abcdef" * 4)
    blob.write_bytes(b"x")
    (tmp_path / "model.safetensors").symlink_to(blob)
    assert content_digest(tmp_path / "model.safetensors") == blob.name


def test_only_prompts_without_an_adapter_are_sent() -> None:
    """A request to port 1 would be logged."""
    tier = PeerStorage("http://127.0.0.1:1")
    assert tier.opened(b"plain")
    assert tier.opened(b"adapter", PROMPT)
    assert not tier._looking
    assert not tier.opened(b"plain", PROMPT)
    tier.close()
