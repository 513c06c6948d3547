"""A conversation with a model: what was said, how it is sampled, how much of the context it takes. No terminal in here."""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from contextlib import closing, suppress
from dataclasses import asdict, fields, replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

from ...errors import MLXInferError, PromptError, SamplingError
from ...types import Chunk, FinishReason, SamplingParams, Usage

if TYPE_CHECKING:
    from ...engine.llm import LLM

FIXED = {"n", "logprobs"}
"""Sampling fields that have no meaning in a chat."""


class Conversation:
    """`ask` streams the next answer. Whatever ends it, what was said so far stays, and a question without an answer does not."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None = None) -> None:
        if llm.tokenizer.chat_template is None:
            raise PromptError(f"{llm.name} has no chat template, so it cannot chat: mlxinfer run continues a text with it")
        self._llm = llm
        self.params = params
        self.system = system
        self.turns: list[dict[str, str]] = []
        self.usage: Usage | None = None
        self.finish_reason: FinishReason | None = None
        self.context_used = 0

    @property
    def name(self) -> str:
        return self._llm.name

    @property
    def context_size(self) -> int:
        return self._llm.max_context

    @property
    def messages(self) -> list[dict[str, str]]:
        return [*_system(self.system), *self.turns]

    def ask(self, text: str) -> Generator[Chunk, None, None]:
        """Chunks of the answer. Raises `PromptError` when the conversation no longer fits in the context."""
        self.usage, self.finish_reason = None, "cancelled"
        ids = self._prompt([*self.messages, {"role": "user", "content": text}])
        pieces: list[str] = []
        count = 0
        try:
            with closing(self._llm.stream(ids, self.params)) as chunks:
                for chunk in chunks:
                    pieces.append(chunk.text)
                    count += len(chunk.token_ids)
                    self.usage, self.finish_reason = chunk.usage, chunk.finish_reason or "cancelled"
                    yield chunk
        finally:
            if pieces:
                self.turns += [{"role": "user", "content": text}, {"role": "assistant", "content": "".join(pieces)}]
                self.context_used = len(ids) + count

    def _prompt(self, messages: list[dict[str, str]]) -> list[int]:
        ids = self._llm.tokenizer.encode_chat(messages)
        if len(ids) >= self.context_size:
            raise PromptError(
                f"the conversation would take {len(ids)} tokens of a context of {self.context_size}: /reset begins anew, /save keeps it"
            )
        return ids

    def reset(self) -> None:
        self.turns, self.usage, self.finish_reason, self.context_used = [], None, None, 0

    def set(self, name: str, value: Any) -> None:
        """Change one field of the sampling parameters. Raises `SamplingError`."""
        names = [field.name for field in fields(SamplingParams) if field.name not in FIXED]
        if name not in names:
            raise SamplingError(f"there is no {name!r} to set: {', '.join(names)}")
        if name == "logit_bias" and isinstance(value, dict):
            value = {int(key) if str(key).isdecimal() else key: bias for key, bias in value.items()}
        self.params = replace(self.params, **{name: value})

    def save(self, path: Path) -> None:
        """Write the conversation as JSON: beside, then renamed. Raises `MLXInferError`."""
        content = {"model": self.name, "system": self.system, "messages": self.turns, "params": asdict(self.params)}
        beside = None
        try:
            with NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
                beside = Path(file.name)
                json.dump(content, file, ensure_ascii=False, indent=1)
            os.replace(beside, path)
        except OSError as error:
            if beside is not None:
                with suppress(OSError):
                    beside.unlink()
            raise MLXInferError(f"cannot write {path}: {error.strerror}") from error

    def load(self, path: Path) -> None:
        """Go on with a saved conversation. Raises `MLXInferError`, and then changes nothing."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            turns = [{"role": str(turn["role"]), "content": str(turn["content"])} for turn in content["messages"]]
            system, params = content["system"], _params(dict(content["params"]))
            if not isinstance(system, (str, type(None))):
                raise TypeError("the system message is no text")
        except OSError as error:
            raise MLXInferError(f"cannot read {path}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise MLXInferError(f"{path} is not a saved conversation") from error
        messages = [*_system(system), *turns]
        used = len(self._llm.tokenizer.encode_chat(messages, add_generation_prompt=False)) if turns else 0
        self.reset()
        self.turns, self.system, self.params, self.context_used = turns, system, params, used


def _system(text: str | None) -> list[dict[str, str]]:
    return [{"role": "system", "content": text}] if text else []


def _params(saved: dict[str, Any]) -> SamplingParams:
    if saved.get("logit_bias"):
        saved["logit_bias"] = {int(key): bias for key, bias in saved["logit_bias"].items()}
    return SamplingParams(**saved)
