"""What a conversion did, tensor by tensor, and what accuracy it cost."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Action = Literal["kept", "cast", "made", "quantized", "requantized", "dequantized"]


@dataclass(frozen=True, slots=True)
class TensorReport:
    """One written tensor."""

    name: str
    sources: tuple[str, ...]
    """Names of the tensors it was made from."""
    shape: tuple[int, ...]
    """Logical shape, that of the unpacked matrix."""
    action: Action
    stored: str
    """How it is written, in words."""
    nbytes: int
    """Bytes written, scales included."""
    error: float
    """Relative: the norm of the difference from the source over the norm of the source."""


@dataclass(frozen=True, slots=True)
class Quality:
    """How the written model's predictions differ from its source's on a text."""

    kl: float
    """Mean KL divergence in nats."""
    top1: float
    """Share of positions where both have the same likeliest token, 0 to 1."""
    tokens: int
    """Positions compared."""


@dataclass(slots=True)
class Report:
    """Every tensor of the source is in the `sources` of a written one, or in `skipped`."""

    source: Path
    destination: Path
    tensors: list[TensorReport] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    """Tensors of the source that were not written, with the reason."""
    copied: list[str] = field(default_factory=list)
    """Other files of the destination: tokenizer, template, licence."""
    parameters: int = 0
    """Numbers in all written tensors, a count."""
    nbytes: int = 0
    """Bytes of all written tensors."""
    source_nbytes: int = 0
    """Bytes of all tensors of the source."""
    notes: list[str] = field(default_factory=list)
    """Lines the user should be told."""
    quality: Quality | None = None
    """None where the result was not compared with its source."""

    @property
    def bits_per_weight(self) -> float:
        """Bits written for each parameter."""
        return self.nbytes * 8 / self.parameters if self.parameters else 0.0

    @property
    def actions(self) -> dict[str, int]:
        return dict(Counter(tensor.action for tensor in self.tensors).most_common())
