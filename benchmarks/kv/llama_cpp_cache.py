"""llama.cpp's caches, through its C interface, with flash attention, which quantized values require."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import llama_cpp as llama
import numpy as np

from ..engines.llama_cpp_engine import quiet
from ..loss import Rows

TYPES = {"f16": llama.GGML_TYPE_F16, "q8_0": llama.GGML_TYPE_Q8_0, "q5_0": llama.GGML_TYPE_Q5_0, "q4_0": llama.GGML_TYPE_Q4_0}
BITS = {"f16": 16, "q8_0": 8.5, "q5_0": 5.5, "q4_0": 4.5}
CHUNK = 64
_FLASH_ATTENTION = 1


def logits(model: Path, ids: list[int], *, keys: str, values: str, threads: int) -> Iterator[Rows]:
    """Logits of all tokens in order, one chunk at a time. Raises `ValueError` if llama.cpp refuses."""
    llama.llama_log_set(quiet, ctypes.c_void_p(0))
    llama.llama_backend_init()
    loaded = llama.llama_model_load_from_file(str(model).encode(), llama.llama_model_default_params())
    params = llama.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = len(ids) + CHUNK, CHUNK, CHUNK
    params.n_threads = params.n_threads_batch = threads
    params.type_k, params.type_v, params.flash_attn_type = TYPES[keys], TYPES[values], _FLASH_ATTENTION
    context = llama.llama_init_from_model(loaded, params)
    if context is None:
        llama.llama_model_free(loaded)
        raise ValueError(f"llama.cpp has no cache of {keys} and {values} for this model")
    size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(loaded))
    batch = llama.llama_batch_init(CHUNK, 0, 1)
    try:
        for start in range(0, len(ids), CHUNK):
            yield _chunk(context, batch, ids[start : start + CHUNK], start, size)
    finally:
        llama.llama_batch_free(batch)
        llama.llama_free(context)
        llama.llama_model_free(loaded)


def _chunk(context: object, batch: llama.llama_batch, ids: list[int], start: int, size: int) -> Rows:
    batch.n_tokens = len(ids)
    for index, token in enumerate(ids):
        batch.token[index], batch.pos[index] = token, start + index
        batch.n_seq_id[index], batch.seq_id[index][0], batch.logits[index] = 1, 0, True
    if llama.llama_decode(context, batch):
        raise ValueError("llama_decode failed")
    rows: Rows = np.ctypeslib.as_array(llama.llama_get_logits(context), (len(ids), size)).copy()
    return rows
