"""The servers of other projects, `llama-server` and mlx-lm's, over HTTP."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import httpx2 as httpx

from ..common.options import LLAMA_SERVER_VARIABLE
from .client import Piece, Prompt, Subject

SLOTS = 4
_START_S = 120.0


class Server(Subject):
    """A process that listens on a free port of this machine."""

    def load(self, model: str, *, threads: int, context: int, **settings: Any) -> dict[str, Any]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  until this process ends
        command = self._command(model, port, threads, context, settings)
        self._process = subprocess.Popen(command, stdout=self._said, stderr=subprocess.STDOUT)
        # Also if the comparing process is killed.
        atexit.register(self._process.kill)
        self.listen(f"http://127.0.0.1:{port}", model)
        self._wait_until_it_listens(f"http://127.0.0.1:{port}/health")
        return {"version": self._version()}

    def listen(self, url: str, model: str) -> None:
        """Connect to a server that runs or will run."""
        self._model = model
        # A server may close an idle connection between two jobs.
        once = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.AsyncClient(base_url=url, timeout=1800, limits=once)

    def close(self) -> dict[str, Any]:
        self._process.terminate()
        self._process.wait()
        return {}

    def cpu_seconds(self) -> float:
        return super().cpu_seconds() + (_used(self._process.pid) if hasattr(self, "_process") else 0.0)

    async def stream(self, prompt: Prompt, tokens: int, *, endless: bool) -> AsyncGenerator[Piece, None]:
        asked = {"prompt": prompt} if isinstance(prompt, str) else {"messages": prompt}
        body = {"max_tokens": tokens, "temperature": float(endless), "stream": True, "stream_options": {"include_usage": True}}
        path = "/v1/completions" if isinstance(prompt, str) else "/v1/chat/completions"
        async with self._client.stream("POST", path, json=body | asked | self._more(endless)) as response:
            if response.is_error:
                raise ValueError((await response.aread()).decode(errors="replace")[:300])
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    yield _piece(json.loads(line[6:]))

    def _command(self, model: str, port: int, threads: int, context: int, settings: dict[str, Any]) -> list[str]:
        raise NotImplementedError

    def _version(self) -> str:
        raise NotImplementedError

    def _more(self, endless: bool) -> dict[str, Any]:
        """Additional fields of a request to this server."""
        raise NotImplementedError

    def _wait_until_it_listens(self, url: str) -> None:
        begun = perf_counter()
        while perf_counter() - begun < _START_S:
            if self._process.poll() is not None:
                self._said.seek(0)
                lines = self._said.read().decode(errors="replace").strip().splitlines()
                raise ValueError(f"it ended with {self._process.returncode}: {lines[-1] if lines else 'it said nothing'}")
            try:
                if httpx.get(url).is_success:
                    return
            except httpx.TransportError:
                pass
            sleep(0.02)
        raise ValueError(f"it does not listen after {_START_S:.0f} s")


class LlamaServer(Server):
    """With `saved`, a folder, the first slot gets all requests, and can be saved there for the next process."""

    def _command(self, model: str, port: int, threads: int, context: int, settings: dict[str, Any]) -> list[str]:
        found = shutil.which(os.environ.get(LLAMA_SERVER_VARIABLE) or "llama-server")
        if found is None:
            raise ValueError(f"there is no llama-server: name it with --llama-server or {LLAMA_SERVER_VARIABLE}")
        saved = settings.get("saved", "")
        self._path, self._slots = found, {"id_slot": 0} if saved else {}
        lengths = ["--parallel", str(SLOTS), "--ctx-size", str(SLOTS * context), "--threads", str(threads)]
        return [found, "--model", model, "--port", str(port), *lengths, *(["--slot-save-path", saved] if saved else [])]

    def _version(self) -> str:
        done = subprocess.run([self._path, "--version"], capture_output=True, text=True, check=True)
        return next((line for line in (done.stdout + done.stderr).splitlines() if line.startswith("version")), "")

    def _more(self, endless: bool) -> dict[str, Any]:
        return {"ignore_eos": endless, "cache_prompt": True} | self._slots

    def save(self) -> dict[str, Any]:
        self.wait(self._slot("save"))
        return {}

    def restored(self, prompt: Prompt, tokens: int) -> dict[str, Any]:
        begun = perf_counter()
        self.wait(self._slot("restore"))
        seconds = perf_counter() - begun
        answer = self.answer(prompt, tokens)
        return answer | {"first_s": answer["first_s"] + seconds}

    async def _slot(self, action: str) -> None:
        response = await self._client.post(f"/slots/0?action={action}", json={"filename": "slot.bin"})
        if response.is_error:
            raise ValueError(response.text[:300])


class MLXServer(Server):
    def _command(self, model: str, port: int, threads: int, context: int, settings: dict[str, Any]) -> list[str]:
        return [sys.executable, "-m", "mlx_lm.server", "--model", model, "--port", str(port), "--log-level", "ERROR"]

    def _version(self) -> str:
        from importlib.metadata import version

        return version("mlx-lm")

    def _more(self, endless: bool) -> dict[str, Any]:
        if not endless:
            return {}
        ends = json.loads((Path(self._model) / "config.json").read_text(encoding="utf-8"))["eos_token_id"]
        return {"logit_bias": {str(end): -100.0 for end in (ends if isinstance(ends, list) else [ends])}}


def _piece(event: dict[str, Any]) -> Piece:
    choice = (event.get("choices") or [{}])[0]
    text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
    usage = event.get("usage") or {}
    reused = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return Piece(text, int(text != ""), usage.get("prompt_tokens", 0), reused, usage.get("completion_tokens", 0))


def _used(pid: int) -> float:
    """Processor time of another process in seconds; 0 where the system does not report it."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
