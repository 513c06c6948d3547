"""Tokenizer of model directories without one: prompts and answers are token ids."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import TokenizerError
from .detokenizer import Detokenizer
from .tokenizer import Tokenizer


class NoTokenizer(Tokenizer):
    """Has the ids that end a turn only. Encoding raises `TokenizerError`; tokens decode to ""."""

    def __init__(self, directory: Path, config: Mapping[str, Any]) -> None:
        self._directory = directory
        self.vocab_size = 0
        self.bos_token_id = None
        eos = config.get("eos_token_id")
        self.eos_token_ids = frozenset(i for i in (eos if isinstance(eos, list) else [eos]) if type(i) is int)

    @property
    def chat_template(self) -> str | None:
        return None

    @property
    def response_template(self) -> Mapping[str, Any] | None:
        return None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        raise self._missing()

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return ""

    def token_text(self, token_id: int) -> str:
        return ""

    def token_bytes(self, token_id: int) -> bytes | None:
        return None

    def detokenizer(self, spelled: Collection[int] = ()) -> Detokenizer:
        return _Silent()

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        raise self._missing()

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        raise self._missing()

    def save(self, directory: Path) -> None:
        """Write nothing."""

    def _missing(self) -> TokenizerError:
        return TokenizerError(f"{self._directory} has no tokenizer files: give token ids, or add tokenizer.json")


class _Silent(Detokenizer):
    def __init__(self) -> None:
        pass

    def add(self, token_id: int) -> str:
        return ""

    def finish(self) -> str:
        return ""
