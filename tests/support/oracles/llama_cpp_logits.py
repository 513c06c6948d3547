"""llama.cpp's logits for a GGUF file, in a process of its own, because llama.cpp ends the process where it cannot go on:
`python llama_cpp_logits.py FILE.gguf IDS.npz OUT.npy`. The library is that of `llama_cpp`, or of LLAMA_CPP_LIB_PATH.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np


def logits(file: str, ids: np.ndarray) -> np.ndarray:
    """float32 `[tokens, vocabulary]`, over a cache in float32. Raises `RuntimeError` with llama.cpp's last messages."""
    import llama_cpp as llama

    said: list[str] = []

    @llama.llama_log_callback
    def log(level: int, text: bytes, data: Any) -> None:
        said.append(text.decode(errors="replace").strip())

    llama.llama_log_set(log, ctypes.c_void_p(0))
    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(file.encode(), llama.llama_model_default_params())
    settings = llama.llama_context_default_params()
    settings.n_ctx = settings.n_batch = settings.n_ubatch = 256
    settings.n_threads = settings.n_threads_batch = 1
    settings.type_k = settings.type_v = llama.GGML_TYPE_F32
    settings.flash_attn_type = 0
    context = llama.llama_init_from_model(model, settings) if model else None
    if not context:
        raise RuntimeError("; ".join(said[-3:]))
    batch = llama.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for at, token in enumerate(ids):
        batch.token[at], batch.pos[at], batch.n_seq_id[at], batch.logits[at] = int(token), at, 1, 1
        batch.seq_id[at][0] = 0
    if llama.llama_decode(context, batch):
        raise RuntimeError("; ".join(said[-3:]))
    size = (llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model)),)
    return np.stack([np.ctypeslib.as_array(llama.llama_get_logits_ith(context, at), size).copy() for at in range(len(ids))])


if __name__ == "__main__":
    np.save(sys.argv[3], logits(sys.argv[1], np.load(sys.argv[2])["ids"]))
