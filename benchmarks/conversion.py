"""What conversions to few bits lose, by encoder: KL divergence of the next token's probabilities from those of the source."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from pydoc_data.topics import topics
from time import perf_counter

import mlx.core as mx
import numpy as np

from mlxinfer import LLM
from mlxinfer.convert import convert
from mlxinfer.convert.encoders import ENCODERS
from mlxinfer.loading.directory import SafetensorsCheckpoint
from mlxinfer.nn.weights import Quantized, numbers

from .loss import Comparison, Loss

_TEXTS, _TOKENS = 8, 384


@dataclass(frozen=True, slots=True)
class Result:
    """One conversion of one model."""

    model: str
    encoder: str
    bits: int
    bits_per_weight: float
    seconds: float
    loss: Loss


def study(models: dict[str, Path], bits: tuple[int, ...], encoders: tuple[str, ...] = ENCODERS) -> Iterator[Result]:
    """Converts each model, and compares the results with it on eight texts of Python's own documentation.

    A file that is quantized already lies on a lattice of its own, which some settings hit by chance: so uniform noise is added within its
    cells first, which is what its quantization had removed. Rankings carry over to the original model; absolute figures need not.
    """
    with tempfile.TemporaryDirectory() as room:
        for name, path in models.items():
            source = Path(room, name)
            convert(path, source, measure=False)
            _leave_the_lattice(source)
            with _opened(source) as exact:
                for number, encoder in product(bits, encoders):
                    result = Path(room, "result")
                    begin = perf_counter()
                    report = convert(source, result, bits=number, dtype="bfloat16", encoder=encoder, measure=False)
                    seconds = perf_counter() - begin
                    yield Result(name, encoder, number, report.bits_per_weight, seconds, _loss(exact, result))
                    shutil.rmtree(result)


def _leave_the_lattice(directory: Path) -> None:
    """Make quantized matrices plain ones in float32."""
    rng = np.random.default_rng(0)
    checkpoint = SafetensorsCheckpoint(directory)
    tensors = {}
    for name in checkpoint.names():
        matrix = checkpoint.read(name)
        plain = np.array(numbers(matrix))
        if isinstance(matrix, Quantized):
            cells = np.repeat(np.abs(np.array(matrix.scales.astype(mx.float32))), matrix.format.group_size, axis=-1)
            plain += cells * (rng.random(plain.shape, dtype=np.float32) - 0.5)
        tensors[name] = mx.array(plain)
    config = {key: value for key, value in checkpoint.config.items() if not key.startswith("quantization")}
    checkpoint.close()
    for file in directory.glob("*.safetensors*"):
        file.unlink()
    mx.save_safetensors(str(directory / "model.safetensors"), tensors, {"format": "mlx"})
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _loss(exact: LLM, result: Path) -> Loss:
    comparison = Comparison()
    with _opened(result) as other:
        pages = sorted(text for text in topics.values() if len(text) > 4000)
        for text in pages[:: len(pages) // _TEXTS][:_TEXTS]:
            ids = exact.tokenizer.encode(text)[:_TOKENS]
            comparison.add(np.array(exact.logits(ids)), np.array(other.logits(ids)), ids[1:])
    return comparison.loss()


def _opened(path: Path) -> LLM:
    return LLM(path, dtype="float32", memory_gb=6, prefix_cache=False)


def table(results: list[Result]) -> str:
    """The results as Markdown."""
    lines = [
        "| model | bits per weight | encoder | KL | 99 % below | same likeliest token | seconds |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: |",
    ]
    for each in results:
        loss = each.loss
        figures = f"{loss.mean_kl:.4f} | {loss.high_kl:.2f} | {loss.same_top:.1%} | {each.seconds:.0f}"
        lines.append(f"| {each.model} | {each.bits_per_weight:.2f} | {each.encoder} | {figures} |")
    return "\n".join(lines) + "\n"


def to_json(results: list[Result]) -> str:
    """The results as data."""
    return json.dumps([asdict(each) for each in results], indent=1) + "\n"
