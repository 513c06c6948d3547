"""llama.cpp, through llama-cpp-python's C interface, used as in llama-bench, with greedy tokens."""

from __future__ import annotations

import ctypes
from time import perf_counter
from typing import Any

import llama_cpp as llama
import numpy as np

from .base import WARM_STEPS, Answer, Engine, random_tokens

_CACHE_TYPES = {8: llama.GGML_TYPE_Q8_0, 4: llama.GGML_TYPE_Q4_0}
_FLASH_ATTENTION = 1
"""On, because quantized values require flash attention. For other caches llama.cpp decides."""
_ROOM = 64
"""Tokens of context for the warm-up steps."""


@llama.llama_log_callback  # type: ignore[untyped-decorator]
def quiet(level: int, text: bytes, data: object) -> None:
    pass


class LlamaCpp(Engine):
    def load(self, model: str, *, threads: int, context: int, prompt: str) -> Answer:
        llama.llama_log_set(quiet, ctypes.c_void_p(0))
        llama.llama_backend_init()
        self.model = llama.llama_model_load_from_file(model.encode(), self._model_params())
        if self.model is None:
            raise ValueError(f"{model} cannot be loaded")
        self.vocabulary = llama.llama_model_get_vocab(self.model)
        self.size = llama.llama_vocab_n_tokens(self.vocabulary)
        self.threads = threads
        self._many: dict[int, Any] = {}
        self._tokens_of_context = context + _ROOM
        self._contexts = {16: self._context(self._tokens_of_context, 1)}
        self.context = self._contexts[16]
        return {"text": self._text(self._feed(self._tokens(prompt)))}

    def about(self) -> Answer:
        from importlib.metadata import version  # not before the first token

        features = llama.llama_print_system_info().decode().strip()
        details, size = f"keys and values in float16, {features}", llama.llama_model_size(self.model)
        return {"version": version("llama-cpp-python"), "details": details, "weight_bytes": size, "cache_item_bytes": 2}

    def prefill(self, tokens: int) -> Answer:
        prompt = random_tokens(tokens, self.size)
        self._forget(self.context)
        start = perf_counter()
        self._feed(prompt)
        return {"seconds": perf_counter() - start}

    def decode(self, depth: int, streams: int, steps: int, kv: int = 16) -> Answer:
        if streams > 1:
            return {"seconds": self._decode_many(depth, streams, steps)}
        if kv not in self._contexts:
            self._contexts[kv] = self._context(self._tokens_of_context, 1, kv)
        self.context = self._contexts[kv]
        self._forget(self.context)
        token = self._feed(random_tokens(max(depth, 1), self.size))
        for _ in range(WARM_STEPS):
            token = self._feed([token])
        start = perf_counter()
        for _ in range(steps):
            token = self._feed([token])
        return {"seconds": perf_counter() - start}

    def _model_params(self) -> Any:
        return llama.llama_model_default_params()

    def _context(self, tokens: int, streams: int, kv: int = 16) -> Any:
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_seq_max = tokens * streams, streams
        if kv != 16:
            params.type_k = params.type_v = _CACHE_TYPES[kv]
            params.flash_attn_type = _FLASH_ATTENTION
        params.n_threads = params.n_threads_batch = self.threads
        context = llama.llama_init_from_model(self.model, params)
        if context is None:
            raise ValueError(f"llama.cpp has no space for {streams} x {tokens} tokens")
        return context

    def _forget(self, context: Any) -> None:
        llama.llama_memory_clear(llama.llama_get_memory(context), False)

    def _feed(self, tokens: list[int]) -> int:
        """Append tokens to the context's only sequence, and return the most likely next token."""
        size = llama.llama_n_batch(self.context)
        for start in range(0, len(tokens), size):
            part = tokens[start : start + size]
            # The batch only points to the array, so a name keeps the array alive.
            array = (llama.llama_token * len(part))(*part)
            self._run(self.context, llama.llama_batch_get_one(array, len(part)))
        return self._likeliest(self.context, -1)

    def _run(self, context: Any, batch: Any) -> None:
        code = llama.llama_decode(context, batch)
        if code:
            raise ValueError(f"llama_decode failed with {code}")

    def _likeliest(self, context: Any, row: int) -> int:
        logits = np.ctypeslib.as_array(llama.llama_get_logits_ith(context, row), (self.size,))
        return int(logits.argmax())

    def _decode_many(self, depth: int, streams: int, steps: int) -> float:
        """Decode all sequences in one batch, one token each."""
        context = self._many.get(streams)
        if context is None:
            context = self._many[streams] = self._context(max(depth, 1) + steps + _ROOM, streams)
        self._forget(context)
        batch = llama.llama_batch_init(max(depth, 1) * streams, 0, streams)
        prompt = random_tokens(max(depth, 1), self.size)
        start = 0.0
        rows = [[(stream, position, token) for position, token in enumerate(prompt)] for stream in range(streams)]
        tokens = [self._step(context, batch, row)[0] for row in rows]
        for step in range(WARM_STEPS + steps):
            if step == WARM_STEPS:
                start = perf_counter()
            position = len(prompt) + step
            tokens = self._step(context, batch, [(stream, position, token) for stream, token in enumerate(tokens)])
        seconds = perf_counter() - start
        llama.llama_batch_free(batch)
        return seconds

    def _step(self, context: Any, batch: Any, rows: list[tuple[int, int, int]]) -> list[int]:
        """Run rows of (sequence, position, token). Returns the most likely next token of each sequence's last row, in order."""
        batch.n_tokens = len(rows)
        last = {stream: index for index, (stream, _, _) in enumerate(rows)}
        for index, (stream, position, token) in enumerate(rows):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, stream
            batch.logits[index] = last[stream] == index
        self._run(context, batch)
        return [self._likeliest(context, index) for index in last.values()]

    def _tokens(self, text: str) -> list[int]:
        data = text.encode()
        room = (llama.llama_token * (len(data) + 8))()
        count = llama.llama_tokenize(self.vocabulary, data, len(data), room, len(room), True, True)
        return list(room[:count])

    def _text(self, token: int) -> str:
        piece = ctypes.create_string_buffer(256)
        length = llama.llama_token_to_piece(self.vocabulary, token, piece, len(piece), 0, True)
        return piece.raw[: max(length, 0)].decode(errors="replace")


def create() -> LlamaCpp:
    return LlamaCpp()
