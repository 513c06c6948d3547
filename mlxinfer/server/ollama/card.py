"""What is known of a loaded model, in Ollama's words."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from typing_extensions import TypedDict

from ...device import is_gpu
from ...loading.identity import identity
from ...loading.summary import Summary
from ...types import SamplingParams
from ..models import Served

_SIZES = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
"""GGUF's key, which Ollama shows, to that of a config."""
_SHOWN = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


class Details(TypedDict):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class Card:
    def __init__(self, served: Served) -> None:
        self.served = served
        self.summary: Summary = served.llm.loaded.summary

    @property
    def details(self) -> Details:
        family = self.summary.architecture
        return Details(
            parent_model="",
            format=self.summary.file_format,
            family=family,
            families=[family],
            parameter_size=human_count(self.summary.parameters),
            quantization_level=self.summary.quantization,
        )

    @property
    def info(self) -> dict[str, Any]:
        """`ARCHITECTURE.context_length` is what is served: it may be less than what the model was made for."""
        family, llm = self.summary.architecture, self.served.llm
        config = llm.loaded.config
        sizes = {f"{family}.{shown}": size for shown, key in _SIZES.items() if (size := _setting(config, key)) is not None}
        general = {"general.architecture": family, "general.parameter_count": self.summary.parameters}
        return {**general, f"{family}.context_length": llm.max_context, f"{family}.vocab_size": llm.loaded.model.vocab_size, **sizes}

    @property
    def parameters(self) -> str:
        """The model's own sampling settings, where they are not neutral."""
        own, neutral = self.served.llm.default_params, SamplingParams()
        lines = [(name, getattr(own, name)) for name in _SHOWN if getattr(own, name) != getattr(neutral, name)]
        return "\n".join(f"{name.replace('repetition', 'repeat'):<30} {value:g}" for name, value in lines)

    @property
    def digest(self) -> str:
        """64 hexadecimal digits that change with the model's files."""
        return hashlib.sha256(identity(self.summary.path).encode()).hexdigest()

    @property
    def modified_at(self) -> str:
        try:
            seconds = self.summary.path.stat().st_mtime
        except OSError:  # removed while it runs
            seconds = self.served.created
        return datetime.fromtimestamp(seconds, timezone.utc).isoformat().replace("+00:00", "Z")

    @property
    def gpu_bytes(self) -> int:
        return self.served.llm.memory_bytes if is_gpu() else 0


def human_count(count: int) -> str:
    """134.52M, 8.0B: as Ollama writes parameters."""
    for unit, size, digits in (("B", 10**9, 1), ("M", 10**6, 2), ("K", 10**3, 2)):
        if count >= size:
            return f"{count / size:.{digits}f}{unit}"
    return str(count)


def _setting(config: Mapping[str, Any], key: str) -> int | None:
    """A number of the config, or of the text model's part of it."""
    inner = config.get("text_config")
    for place in (config, inner if isinstance(inner, Mapping) else {}):
        if isinstance(place.get(key), int):
            return int(place[key])
    return None
