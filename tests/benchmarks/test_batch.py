"""The study of many requests at once, with fake subjects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from click.testing import CliRunner
from support.models.tiny_directory import tiny_directory
from support.tokenizers.golden_tokenizers import golden_tokenizer

from benchmarks.__main__ import main
from benchmarks.batch import report
from benchmarks.batch import workloads as works
from benchmarks.batch.client import Piece, Prompt, Subject
from benchmarks.batch.servers import LlamaServer, MLXServer
from benchmarks.batch.study import BatchStudy, Settings
from benchmarks.batch.texts import CODE, edits, passage
from benchmarks.common.options import LLAMA_SERVER_VARIABLE
from benchmarks.common.process import WorkerError
from benchmarks.common.samples import Results, Sample


class Pretender(Subject):
    """Yields a token per turn of the event loop. The first token of a long prompt arrives after `patience` turns."""

    def __init__(self, patience: int = 50) -> None:
        super().__init__()
        self.patience = patience
        self.ended: list[str] = []

    def load(self, model: str, *, threads: int, context: int, **settings: Any) -> dict[str, Any]:
        return {"version": "1"}

    async def stream(self, prompt: Prompt, tokens: int, *, endless: bool) -> AsyncGenerator[Piece, None]:
        try:
            for _ in range(self.patience if prompt == "long" else 0):
                await asyncio.sleep(0)
            for _ in count() if endless else range(tokens):
                await asyncio.sleep(0)
                yield Piece("x", 1)
            yield Piece("", 0, 10, 4, tokens)
        finally:
            self.ended.append(str(prompt))


def test_an_answer_has_its_text_and_its_counts() -> None:
    answer = Pretender().answer("short", 3)
    assert answer.pop("first_s") > 0
    assert answer == {"text": "xxx", "prompt_tokens": 10, "reused_tokens": 4, "answer_tokens": 3}


def test_a_stream_beside_a_prompt_is_ended_with_it() -> None:
    subject = Pretender()
    found = subject.beside("short", "long", 0.0)
    assert min(found.values()) > 0
    assert sorted(subject.ended) == ["long", "short"]


class Server(BaseHTTPRequestHandler):
    """A server with the answers of both real servers."""

    events = (
        {"choices": [{"text": "one"}]},
        {"choices": [{"delta": {"content": " two"}}]},
        {"choices": [{"delta": {"role": "assistant", "content": None}}]},
        {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 5}}},
    )
    asked: dict[str, Any]

    def do_POST(self) -> None:
        type(self).asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(400 if self.path == "/v1/chat/completions" else 200)
        self.end_headers()
        self.wfile.write(b": keepalive 1/2\n\n")
        for event in self.events:
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as found:
        Thread(target=found.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{found.server_port}"
        found.shutdown()


def test_answers_arrive_over_http(server: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": [2, 7]}')
    subject = MLXServer()
    subject.listen(server, str(tmp_path))
    answer = subject.answer("hello", 5)
    assert {key: answer[key] for key in ("text", "prompt_tokens", "reused_tokens", "answer_tokens")} == {
        "text": "one two", "prompt_tokens": 9, "reused_tokens": 5, "answer_tokens": 2,
    }  # fmt: skip
    assert (Server.asked["prompt"], Server.asked["max_tokens"], Server.asked["temperature"]) == ("hello", 5, 0)
    assert "logit_bias" not in Server.asked
    subject.wait(collect(subject))
    assert (Server.asked["logit_bias"], Server.asked["temperature"]) == ({"2": -100.0, "7": -100.0}, 1)
    with pytest.raises(ValueError, match="keepalive"):
        subject.answer([{"role": "user", "content": "hello"}], 5)


async def collect(subject: Subject) -> list[Piece]:
    return [piece async for piece in subject.stream("hello", 5, endless=True)]


def test_a_missing_or_broken_server_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(LLAMA_SERVER_VARIABLE, str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="there is no llama-server: name it with --llama-server"):
        LlamaServer().load("x.gguf", threads=1, context=100)
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho not today\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv(LLAMA_SERVER_VARIABLE, str(broken))
    with pytest.raises(ValueError, match="it ended with 3: not today"):
        LlamaServer().load("x.gguf", threads=1, context=100)


def test_passages_have_their_length_and_begin_differently() -> None:
    tokenizer = golden_tokenizer("smollm2")
    first, second = passage(tokenizer, 300, 11), passage(tokenizer, 300, 12)
    assert abs(len(tokenizer.encode(first)) - 300) <= 2
    assert first[:3] != second[:3]


def test_edits_hold_the_code() -> None:
    asked = [messages[0]["content"] for messages in edits()]
    assert len(set(asked)) == 4
    assert all(CODE in text and "`" in text for text in asked)
    compile(CODE, "code", "exec")
    assert len(CODE.splitlines()) == 40


def test_a_slow_engine_gets_less() -> None:
    plan = works.Plan()
    assert plan.limited(None) == plan
    less = plan.limited(128)
    assert (less.prompt, less.steps, less.streams) == (128, 4, plan.streams)
    assert less.context < plan.context


SPEEDS = {works.UNDRAFTED: 100.0, works.DETERMINISTIC: 50.0, works.LLAMA: 40.0, works.MLX_LM: 4.0}
FIRST_S = {works.OURS: (2.0, 0.08, 0.2), works.LLAMA_SERVER: (6.0, 0.6, 0.3), works.MLX_SERVER: (20.0, 2.0, 0.0)}


class Pretended:
    """A worker with immediate answers."""

    def __init__(self, engine: str, log: list[tuple[str, str]], missing: str) -> None:
        self.engine = engine
        self.log = log
        self.missing = missing
        self.turn = 0

    def __enter__(self) -> Pretended:
        return self

    def __exit__(self, *error: object) -> None:
        self.log.append((self.engine, "ended"))

    def ask(self, do: str, **job: Any) -> dict[str, Any]:
        self.log.append((self.engine, do))
        if self.engine == self.missing:
            raise WorkerError(f"{self.engine}: not here")
        return {"others": 0.0, "idle_cpu_s": 0.0} | getattr(self, f"_{do}", dict)(**job)

    def _load(self, **job: Any) -> dict[str, Any]:
        assert ("prompt" in job) == (self.engine in (works.LLAMA, works.MLX_LM))
        return {"version": "1", "text": ""}

    def _about(self) -> dict[str, Any]:
        return {"version": "1"}

    def _decode(self, depth: int, streams: int, steps: int) -> dict[str, Any]:
        return {"seconds": streams * steps / SPEEDS[self.engine] / streams**0.5}

    def _beside(self, prompt: str, long: str, alone_s: float) -> dict[str, Any]:
        return {"alone": 100.0, "beside": 80.0 if self.engine == works.OURS else 1.0, "first_s": 3.0}

    def _answer(self, prompt: Any, tokens: int) -> dict[str, Any]:
        if isinstance(prompt, str):
            warm = "class" in prompt[-40:]
            return {
                "first_s": FIRST_S.get(self.engine, (1.0, 1.0))[warm],
                "text": "",
                "prompt_tokens": 100,
                "reused_tokens": 90 * warm,
                "answer_tokens": 2,
            }
        turn = len(prompt) // 2
        length, reused = 100 + 30 * turn, (100 + 30 * (turn - 1) + 9 if turn > 1 else 0)
        return {"first_s": 0.1, "text": "y", "prompt_tokens": length, "reused_tokens": reused, "answer_tokens": 10}

    def _restored(self, prompt: Any, tokens: int) -> dict[str, Any]:
        return self._answer(prompt, tokens) | {"first_s": FIRST_S[self.engine][2]}

    def _write(self, prompts: list[Any], tokens: int, temperature: float) -> dict[str, Any]:
        drafted = 100 if self.engine == works.OURS and not temperature else 0
        return {"seconds": 0.5 if drafted else 1.0, "tokens": 100, "drafted": drafted, "accepted": drafted * 0.9, "checksum": 7}


def study(monkeypatch: pytest.MonkeyPatch, folder: Path, log: list[tuple[str, str]], *, missing: str = "", rounds: int = 2) -> BatchStudy:
    monkeypatch.setattr("benchmarks.batch.study.open_checkpoint", lambda path: type("Closed", (), {"close": lambda self: None})())
    monkeypatch.setattr("benchmarks.batch.study.load_tokenizer", lambda checkpoint: golden_tokenizer("smollm2"))
    settings = Settings(rounds, 1, works.Plan(prompt=100, steps=8, turns=3), limits={works.MLX_SERVER: 20, works.MLX_LM: 20})
    return BatchStudy("m", folder, settings, lambda text: None, lambda engine, threads: Pretended(engine, log, missing))  # type: ignore[arg-type, return-value]


def samples(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[Sample]:
    return list(study(monkeypatch, folder, []).run())


def test_every_round_has_every_engine_and_another_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = samples(monkeypatch, tmp_path)
    for number in (1, 2):
        engines = [s.engine for s in found if s.round == number and s.work == works.COLD]
        assert set(engines) == set(works.SERVERS)
    assert len({next(s.engine for s in found if s.round == number and s.work == works.COLD) for number in (1, 2)}) == 2
    assert {s.streams for s in found if s.engine == works.DETERMINISTIC} == {1, 8}
    assert {s.length for s in found if s.work == works.COLD} == {100, 20}
    assert {s.engine for s in found if s.work == works.DISK} == {works.OURS, works.LLAMA_SERVER}


def test_a_restart_is_two_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log: list[tuple[str, str]] = []
    list(study(monkeypatch, tmp_path, log, rounds=1).run())
    start = log.index((works.OURS, "save"))
    ours = [kind for engine, kind in log[start:] if engine == works.OURS]
    assert ours[:7] == ["save", "close", "ended", "load", "answer", "restored", "close"]


@pytest.mark.parametrize("missing", [works.LLAMA_SERVER, works.MLX_LM])
def test_an_engine_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, missing: str) -> None:
    measured = study(monkeypatch, tmp_path, [], missing=missing, rounds=1)
    assert missing not in {s.engine for s in measured.run()}
    assert measured.left_out == {missing: f"{missing}: not here"}


def test_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    results = Results("m", samples(monkeypatch, tmp_path))
    engine = {"version": "1"}
    about = {
        "processor": "A processor", "threads": 2, "system": "Linux", "date": "today", "python": "3.12", "packages": {"mlx": "1"},
        "commit": "abc", "models": {"m": {"file": "m.gguf", "left_out": {"mlx-lm": "gone"}, "engines": {works.LLAMA_SERVER: engine}}},
    }  # fmt: skip
    text = report.document([results], about)
    assert "20.0 s (20.0–20.0) at 20" in text
    assert "mlx-lm is left out: gone" in text


@pytest.mark.parametrize(
    "arguments",
    [["--limit", "vllm=5"], ["--limit", "mlx-lm"], ["--works", "dance"], ["--engines", "vllm"], ["--streams", "0"], ["--streams", "17"],
     ["--streams", "a"], ["--prompt", "1"], ["--llama-server", "/nothing/there"]],
    ids=" ".join,
)  # fmt: skip
def test_bad_input_is_refused_before_anything_is_measured(tmp_path: Path, arguments: list[str]) -> None:
    tiny = tiny_directory(tmp_path / "tiny", context=4096)
    done = CliRunner().invoke(main, ["batch", "--name", str(tmp_path / "x"), "--model", f"tiny={tiny}", *arguments])
    assert done.exit_code == 2
    assert not (tmp_path / "x.csv").exists()
