"""What there is to know of a model before loading it."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

from ..errors import MLXInferError
from ..loading.checkpoint import Checkpoint
from ..loading.dtypes import dtype_name
from ..loading.load import load_tokenizer, open_checkpoint
from ..models import supports
from ..nn.weights import Format


def facts(path: Path) -> dict[str, Any]:
    """Name to value, in the order to show them; read from headers. Raises `MLXInferError`."""
    checkpoint = open_checkpoint(path)
    try:
        config = checkpoint.config
        text: dict[str, Any] = config["text_config"] if isinstance(config.get("text_config"), dict) else config
        heads = text.get("num_attention_heads")
        names = checkpoint.names()
        parameters = sum(math.prod(checkpoint.shape(name)) for name in names)
        nbytes = sum(checkpoint.nbytes(name) for name in names)
        return {
            "path": path,
            "architecture": config.get("model_type"),
            "runs through": "its own graph" if supports(str(config.get("model_type"))) else "mlx-lm, one sequence at a time",
            "layers": text.get("num_hidden_layers"),
            "hidden size": text.get("hidden_size"),
            "heads": f"{heads} query, {text.get('num_key_value_heads', heads)} key-value",
            "vocabulary": text.get("vocab_size"),
            "context": text.get("max_position_embeddings"),
            "parameters": parameters,
            "bytes": nbytes,
            "bits per weight": round(8 * nbytes / parameters, 2) if parameters else 0.0,
            "stored as": _formats(checkpoint),
            "chat template": _template(checkpoint),
        }
    finally:
        checkpoint.close()


def _formats(checkpoint: Checkpoint) -> str:
    """What the parameters are stored in, the most frequent first."""
    counts: Counter[str] = Counter()
    for name in checkpoint.names():
        stored = checkpoint.stored(name)
        label = f"{stored.bits}-bit {stored.mode}, groups of {stored.group_size}" if isinstance(stored, Format) else dtype_name(stored)
        counts[label] += math.prod(checkpoint.shape(name))
    total = sum(counts.values())
    return "; ".join(f"{label} ({count / total:.1%})" for label, count in counts.most_common())


def _template(checkpoint: Checkpoint) -> str:
    try:
        return "yes" if load_tokenizer(checkpoint).chat_template else "none"
    except MLXInferError as error:
        return f"unknown ({error})"
