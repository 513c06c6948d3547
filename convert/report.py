"""What a conversion did, tensor by tensor, and what it cost."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Action = Literal["kept", "cast", "made", "quantized", "requantized", "dequantized"]


@dataclass(frozen=True, slots=True)
class TensorReport:
    """One written tensor. `error` is relative: the norm of the difference to the source over the norm of the source."""

    name: str
    sources: tuple[str, ...]
    shape: tuple[int, ...]
    action: Action
    stored: str
    nbytes: int
    error: float


@dataclass(frozen=True, slots=True)
class Quality:
    """How the written model differs from its source on `tokens` positions of a text: mean KL divergence in nats, and the share of
    positions where both have the same likeliest token."""

    kl: float
    top1: float
    tokens: int


@dataclass(slots=True)
class Report:
    """Every tensor of the source is in the `sources` of a written one, or in `skipped` with the reason."""

    source: Path
    destination: Path
    tensors: list[TensorReport] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    copied: list[str] = field(default_factory=list)
    parameters: int = 0
    nbytes: int = 0
    source_nbytes: int = 0
    notes: list[str] = field(default_factory=list)
    quality: Quality | None = None

    @property
    def bits_per_weight(self) -> float:
        """Counted from the bytes that were written."""
        return self.nbytes * 8 / self.parameters if self.parameters else 0.0

    @property
    def actions(self) -> dict[str, int]:
        return dict(Counter(tensor.action for tensor in self.tensors).most_common())
