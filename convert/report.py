"""Report of a conversion, the measurement of its loss, and the documents: `quantization_report.json` for programs, a model card for people.

Both documents depend on the source and the settings only, without dates or paths, so an interrupted conversion ends in the same bytes.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from .. import kernels_cpu
from .._version import __version__
from ..evaluation.measure import POSITIONS, Reading, compare
from ..evaluation.verdict import Level, level_of, verdict
from ..loading.files import to_json
from ..loading.find.resolve import ALIASES
from ..loading.formats import dtype_name
from ..loading.weights import Progress
from ..util.device import default_dtype, device_memory, is_gpu
from ..util.words import counted

Action = Literal["kept", "cast", "made", "quantized", "requantized", "dequantized"]


@dataclass(frozen=True, slots=True)
class TensorReport:
    """One written tensor."""

    name: str
    """Name in the destination."""
    sources: tuple[str, ...]
    """Names of the source tensors it is made from."""
    shape: tuple[int, ...]
    """Logical shape, as of the unpacked matrix."""
    action: Action
    """Treatment of the tensor."""
    stored: str
    """Stored format, in words."""
    nbytes: int
    """Bytes written, scales included."""
    error: float
    """Relative error: norm of the difference from the source over norm of the source."""
    origin: str = ""
    """Format in the source, as its tool calls it, such as "BF16", "Q4_K" or "GPTQ, 4 bits in groups of 128"."""

    weighted_error: float | None = None
    """`error` with each column weighted by the mean square of its inputs; None if these were not measured."""

    @property
    def loss(self) -> Literal["exact", "rounded", "quantized", "requantized"]:
        """Kind of loss: none, rounding to a dtype, or to codes, once or again. `error` has its size."""
        if not self.error:
            return "exact"
        return "quantized" if self.action == "quantized" else "requantized" if self.action == "requantized" else "rounded"


@dataclass(frozen=True, slots=True)
class Quality:
    """Difference of the written model from its source on a text."""

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
    """SHA-256 of the token ids, in hexadecimal."""

    @property
    def verdict(self) -> str:
        """Verdict in a sentence for people, with the share of words that change."""
        return verdict(self.kl, self.top1)

    @property
    def level(self) -> Level:
        """Verdict in one word, from "same" to "unusable"."""
        return level_of(self.kl, self.top1)


@dataclass(slots=True)
class Report:
    """Result of a conversion. Every source tensor is in the `sources` of a written one, or in `skipped`."""

    source: Path
    """The converted directory or file."""
    destination: Path
    """The directory written."""
    tensors: list[TensorReport] = field(default_factory=list)
    """Written tensors."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Source tensors that were not written, with the reason."""
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
    """Name by which the source was requested, or a directory's name."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the conversion (bits, encoder, calibration and so on) as JSON values."""
    sees: bool = False
    """True if the result has a vision tower that is loaded with it."""

    @property
    def bits_per_weight(self) -> float:
        """Bits written per parameter."""
        return self.nbytes * 8 / self.parameters if self.parameters else 0.0

    @property
    def actions(self) -> dict[str, int]:
        """Number of tensors by action, most frequent first."""
        return dict(Counter(tensor.action for tensor in self.tensors).most_common())


LEAST_TOKENS = 128
"""Fewer positions are not significant."""
_CHECKED = 512
"""Positions if nothing was to be quantized: formats with the same codes lose hardly anything."""
_SECONDS = 45
"""Time for both models together, unless a comparison is required."""
_GPU_RATE, _KERNELS_RATE, _PLAIN_RATE = 1e12, 2.5e10, 1e9
"""Approximate multiply-adds per second while reading: a small Apple GPU (computed), two cores with the CPU kernels and without."""


def tokens_to_measure(parameters: int, *, required: bool = False, quantized: bool = True) -> int:
    """Return the number of positions that can be compared within a minute and within memory; fewer if nothing is `quantized`.

    Below `LEAST_TOKENS`, the result is 0. A `required` comparison always has `POSITIONS`.
    """
    if required:
        return POSITIONS
    if parameters * default_dtype().size > device_memory().usable / 2:
        return 0
    rate = _GPU_RATE if is_gpu() else _KERNELS_RATE if kernels_cpu.in_use() else _PLAIN_RATE
    count = min(POSITIONS if quantized else _CHECKED, int(_SECONDS * rate / (2 * max(parameters, 1))))
    return count if count >= LEAST_TOKENS else 0


def measure_loss(
    source: Path, converted: Path, parameters: int, count: int, *, memory_gb: float | None = None, progress: Progress | None = None
) -> Quality:
    """Compare the two models at `count` positions of the shipped text.

    One model is in memory at a time, or one block of it if `memory_gb` is too little. `progress` gets (positions read, positions of both
    models). Raises `MLXInferError`.
    """
    settings = _dtype_setting(parameters) | ({} if memory_gb is None else {"memory_gb": memory_gb})
    read: dict[str, int] = {}

    def tell(what: str, done: int, total: int) -> None:
        read[what] = done
        if progress:
            progress(sum(read.values()), 2 * total)

    found = compare(source, [converted], Reading(positions=count, settings=settings), tell)
    figures = found.students[0]
    return Quality(
        kl=figures.kl_mean or 0.0,
        top1=figures.top1 or 0.0,
        tokens=figures.positions,
        kl_stderr=figures.kl_stderr,
        kl_p99=figures.kl_p99 or 0.0,
        top1_stderr=figures.top1_stderr,
        perplexity_ratio=figures.ppl_ratio or 1.0,
        text=found.text.name,
        text_sha256=found.text.digest,
    )


def _dtype_setting(parameters: int) -> dict[str, Any]:
    """Return float32 if memory allows: rounding of activations to 16 bits would add to the measured loss."""
    room = parameters * 4 <= device_memory().usable / 2
    return {"dtype": "float32" if room else dtype_name(default_dtype())}


REPORT, CARD = "quantization_report.json", "README.md"
_LONG = ("shard_bytes", "plan")
"""Settings left out of the card; the report has them."""
_FRONT = re.compile(rb"\A---\r?\n(.*?\n)---[ \t]*\r?\n", re.DOTALL)
_CACHED = re.compile(r"models--(?P<repo>[^/]+)/snapshots/")
_KEPT = ("license", "license_name", "license_link", "language", "pipeline_tag", "datasets")
"""Fields of the source's card that also apply to the result."""


def write_documents(directory: Path, report: Report) -> list[str]:
    """Write both files and return their names. The source's model card follows ours. Raises OSError."""
    card = _card_of(report.source)
    (directory / REPORT).write_text(to_json(report_object(report)), encoding="utf-8")
    (directory / CARD).write_bytes(model_card(report, card))
    return [name for name in (CARD, REPORT) if name not in report.copied]


def report_object(report: Report) -> dict[str, Any]:
    """Return the report as JSON values. Errors are relative; `weighted_error` weights each column with the mean square of its inputs."""
    return {
        "tool": {"name": "mlxinfer", "version": __version__},
        "source": base_model(report) or report.name,
        "settings": report.settings,
        "parameters": report.parameters,
        "bytes": report.nbytes,
        "source_bytes": report.source_nbytes,
        "bits_per_weight": report.bits_per_weight,
        "tensors_by_loss": dict(Counter(tensor.loss for tensor in report.tensors)),
        "quality": _quality_object(report.quality),
        "tensors": [_tensor_object(tensor) for tensor in report.tensors],
        "skipped": report.skipped,
        "notes": report.notes,
    }


def _tensor_object(tensor: TensorReport) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "shape": list(tensor.shape),
        "sources": list(tensor.sources),
        "from": tensor.origin,
        "to": tensor.stored,
        "action": tensor.action,
        "loss": tensor.loss,
        "error": tensor.error,
        "weighted_error": tensor.weighted_error,
        "bytes": tensor.nbytes,
    }


def _quality_object(quality: Quality | None) -> dict[str, Any] | None:
    if quality is None:
        return None
    found = asdict(quality)
    return {"kl_mean": found.pop("kl"), "positions": found.pop("tokens"), **found, "level": quality.level}


def base_model(report: Report) -> str | None:
    """Return the hub id of the source, or None if it is unknown."""
    if cached := _CACHED.search(report.source.as_posix()):
        return cached["repo"].replace("--", "/")
    alias = ALIASES.get(report.name)
    return alias.hub_id if alias else None


def model_card(report: Report, source: bytes) -> bytes:
    """Return the card: ours, with the source's licence and language, followed by the source's."""
    front, body = _divided(source)
    fields = {name: front[name] for name in _KEPT if name in front}
    base, tags = base_model(report) or front.get("base_model"), [tag for tag in _listed(front.get("tags")) if tag != "mlx"]
    fields |= {"library_name": "mlx", "tags": ["mlx", *(tag for tag in ("mlxinfer",) if tag not in tags), *tags]}
    if base:
        fields |= {"base_model": base, "base_model_relation": "quantized"}
    text = f"---\n{yaml.safe_dump(fields, sort_keys=True, allow_unicode=True)}---\n\n" + "\n".join(_lines(report, base)) + "\n"
    if not body.strip():
        return text.encode()
    return text.encode() + b"\n## The model card of the source\n\n" + body.lstrip(b"\r\n")


def _lines(report: Report, base: object) -> list[str]:
    name, settings = base if isinstance(base, str) else report.name, {k: value for k, value in report.settings.items() if value is not None}
    lines = [
        f"# {name.rpartition('/')[2]}, {report.bits_per_weight:.2f} bits per weight",
        "",
        f"Made from {name} by mlxinfer {__version__}, for MLX.",
    ]
    lines += ["", f"- {report.nbytes / 1e9:.3g} GB"]
    kinds = Counter(tensor.stored for tensor in report.tensors if len(tensor.shape) > 1)
    lines += [f"- {counted(count, 'matrix', 'matrices')}: {kind}" for kind, count in kinds.most_common()]
    settings |= settings.pop("budget", {})
    known = {key.replace("_", " "): value for key, value in settings.items() if key not in _LONG and value is not None}
    lines += ["- " + ", ".join(f"{key} {value}" for key, value in known.items())]
    lines += [f"- {note}" for note in report.notes]
    lines += ["", *_loss_lines(report.quality), "", "`quantization_report.json` says what was done with each tensor.", "", "## Use", ""]
    commands = ['mlxinfer run . "Hello"', 'mlx_lm.generate --model . --prompt "Hello"']
    if report.sees:
        asked = '"What is this?" --image picture.png'
        commands = [f"mlxinfer run . {asked}", f"mlx_vlm.generate --model . --prompt {asked}"]
    return [*lines, "In the directory of this file:", "", "```", *commands, "```"]


def _loss_lines(quality: Quality | None) -> list[str]:
    if quality is None:
        return ["Its outputs were not compared with the source's."]
    kl = f"{quality.kl:.4f}" + ("" if quality.kl_stderr is None else f" ± {quality.kl_stderr:.4f}")
    return [
        quality.verdict,
        "",
        f"Against the source, at {quality.tokens:,} positions of {quality.text}: KL divergence of the next token's probabilities {kl} "
        f"nats, the same likeliest token {quality.top1:.1%}, perplexity x{quality.perplexity_ratio:.3f}.",
    ]


def _card_of(source: Path) -> bytes:
    try:
        return (source / CARD).read_bytes() if source.is_dir() else b""
    except OSError:
        return b""


def _divided(card: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the fields at the top of a card, and its text."""
    found = _FRONT.match(card)
    if not found:
        return {}, card
    try:
        fields = yaml.safe_load(found[1].decode())
    except (UnicodeDecodeError, yaml.YAMLError):
        return {}, card
    return (fields, card[found.end() :]) if isinstance(fields, dict) else ({}, card)


def _listed(value: object) -> list[str]:
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else [value] if isinstance(value, str) else []
