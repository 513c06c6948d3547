"""llama.cpp with its usual mapping of the file. The kernel decides which pages of experts are in memory."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from ..engines.llama_cpp_engine import LlamaCpp
from .worker import CONTEXT, Answer, Subject


class MappedLlamaCpp(Subject):
    def load(self, model: str, threads: int, share: float) -> Answer:
        begun = perf_counter()
        self._engine = _Engine(repacks=share == 1)
        self._engine.load(model, threads=threads, context=CONTEXT, prompt="ab")
        return {"seconds": perf_counter() - begun}

    def tokens(self, prompt: list[int], count: int) -> list[tuple[int, float]]:
        token = self._engine.start(prompt)
        found = [(token, perf_counter())]
        while len(found) < count:
            token = self._engine.next(token)
            found.append((token, perf_counter()))
        return found


class _Engine(LlamaCpp):
    def __init__(self, *, repacks: bool) -> None:
        """With `repacks`, matrices are copied into memory in a faster layout, as llama.cpp does by default. Such copies are not mapped."""
        self._repacks = repacks

    def _model_params(self) -> Any:
        params = super()._model_params()
        params.use_extra_bufts = self._repacks
        return params

    def start(self, prompt: list[int]) -> int:
        """Forget everything, read a prompt, and return the likeliest token after it."""
        self._forget(self.context)
        return self._feed(prompt)

    def next(self, token: int) -> int:
        """Read one more token."""
        return self._feed([token])
