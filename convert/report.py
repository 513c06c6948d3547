"""What a conversion did, tensor by tensor, and what accuracy it cost."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..evaluation.verdict import Level, level_of, verdict

Action = Literal["kept", "cast", "made", "quantized", "requantized", "dequantized"]


@dataclass(frozen=True, slots=True)
class TensorReport:
    """One written tensor."""

    name: str
    """Name in the destination."""
    sources: tuple[str, ...]
    """Names of the source tensors that it was made from."""
    shape: tuple[int, ...]
    """Logical shape, that of the unpacked matrix."""
    action: Action
    """What was done with it."""
    stored: str
    """How it is written, in words."""
    nbytes: int
    """Bytes written, scales included."""
    error: float
    """Relative: norm of the difference from the source over norm of the source."""
    origin: str = ""
    """How the source stores it, by the name that its tool has for it, such as "BF16", "Q4_K" or "GPTQ, 4 bits in groups of 128"."""

    weighted_error: float | None = None
    """`error` with each column weighed by the mean square of its inputs; None where these were not measured."""

    @property
    def loss(self) -> Literal["exact", "rounded", "quantized", "requantized"]:
        """What became of the numbers: all of them the same, rounded to a dtype, or to codes, once or again. `error` says how much."""
        if not self.error:
            return "exact"
        return "quantized" if self.action == "quantized" else "requantized" if self.action == "requantized" else "rounded"


@dataclass(frozen=True, slots=True)
class Quality:
    """How the written model differs from its source on a text."""

    kl: float
    """Mean KL divergence in nats."""
    top1: float
    """Share of positions where both have the same most likely token, 0 to 1."""
    tokens: int
    """Positions compared."""
    kl_stderr: float | None = None
    """Standard error of the mean KL divergence."""
    kl_p99: float = 0.0
    """99 % of the positions have a smaller KL divergence."""
    top1_stderr: float | None = None
    """Standard error of `top1`."""
    perplexity_ratio: float = 1.0
    """Perplexity over the source's."""
    text: str = ""
    """Name of the text."""
    text_sha256: str = ""
    """Hash of the token ids that were read, in hexadecimal."""

    @property
    def verdict(self) -> str:
        """A sentence for people: how good the model is, and how many words change."""
        return verdict(self.kl, self.top1)

    @property
    def level(self) -> Level:
        """The verdict in one word, from "same" to "unusable"."""
        return level_of(self.kl, self.top1)


@dataclass(slots=True)
class Report:
    """The result of a conversion. Every tensor of the source is in the `sources` of a written one, or in `skipped`."""

    source: Path
    """What was converted."""
    destination: Path
    """The directory written."""
    tensors: list[TensorReport] = field(default_factory=list)
    """Written tensors."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Tensors of the source that were not written, with the reason."""
    copied: list[str] = field(default_factory=list)
    """Other files of the destination: tokenizer, template, licence."""
    parameters: int = 0
    """Number of values in all written tensors."""
    nbytes: int = 0
    """Bytes of all written tensors."""
    source_nbytes: int = 0
    """Bytes of all tensors of the source."""
    notes: list[str] = field(default_factory=list)
    """Messages for the user."""
    quality: Quality | None = None
    """None if the result was not compared with its source."""
    name: str = ""
    """What the source was asked for as, or a directory's name."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What was asked for: bits, encoder, calibration and so on; JSON values only."""

    @property
    def bits_per_weight(self) -> float:
        """Bits written per parameter."""
        return self.nbytes * 8 / self.parameters if self.parameters else 0.0

    @property
    def actions(self) -> dict[str, int]:
        """Number of tensors by action, the most frequent first."""
        return dict(Counter(tensor.action for tensor in self.tensors).most_common())
