"""What is written about a conversion: `quantization_report.json` for programs, and a model card for people and the hub.

Both depend on the source and the settings only: no dates, no paths, so that a conversion that was interrupted ends in the same bytes.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from ..._version import __version__
from ...loading.files import to_json
from ...loading.find.resolve import ALIASES
from ...util.words import counted
from ..report import Quality, Report, TensorReport

REPORT, CARD = "quantization_report.json", "README.md"
_LONG = ("shard_bytes", "plan")
"""Settings that say nothing to people, or too much: the report has them."""
_FRONT = re.compile(rb"\A---\r?\n(.*?\n)---[ \t]*\r?\n", re.DOTALL)
_CACHED = re.compile(r"models--(?P<repo>[^/]+)/snapshots/")
_KEPT = ("license", "license_name", "license_link", "language", "pipeline_tag", "datasets")
"""Fields of a source's card that hold for what is made of it, too."""


def write_documents(directory: Path, report: Report) -> list[str]:
    """Write both files, and return their names. The source's own model card is kept below ours. Raises OSError."""
    card = _card_of(report.source)
    (directory / REPORT).write_text(to_json(report_object(report)), encoding="utf-8")
    (directory / CARD).write_bytes(model_card(report, card))
    return [name for name in (CARD, REPORT) if name not in report.copied]


def report_object(report: Report) -> dict[str, Any]:
    """The report as JSON values. Errors are relative, norm of the difference over norm of the source; `weighted_error` weighs each column
    with the mean square of its inputs."""
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
    """The hub id of what was converted; None where nothing tells."""
    if cached := _CACHED.search(report.source.as_posix()):
        return cached["repo"].replace("--", "/")
    alias = ALIASES.get(report.name)
    return alias.hub_id if alias else None


def model_card(report: Report, source: bytes) -> bytes:
    """The card's text: ours, then that of the source, whose licence and language are taken over."""
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
    """The fields at the top of a card, and the rest."""
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
