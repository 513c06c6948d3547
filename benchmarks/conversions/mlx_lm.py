"""What mlx-lm makes of a model: its recipes, and its quantizers that read a text, with our samples instead of a download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import optimizers

from .source import LENGTH, samples

PIECES = 1
"""Pieces of the samples that GPTQ reads: more of them take it hours on a CPU."""
_DYNAMIC_BPW = 4.92
_LOW, _HIGH = (4, 64), (5, 64)
"""Bits and group size of the two formats of `mlx_lm.dynamic_quant`: its defaults."""
_VALID, _BATCH, _RATE, _SEED = 16, 4, 1e-6, 123
"""Texts that DWQ validates with, texts of a step, learning rate and seed: the last three are its defaults."""


def recipe(source: Path, target: Path, *, name: str) -> None:
    """`mlx_lm.convert` with one of its mixtures of bits."""
    from mlx_lm import convert

    convert(str(source), str(target), quantize=True, q_group_size=64, q_bits=4, dtype="bfloat16", quant_predicate=name)


def gptq(source: Path, target: Path) -> None:
    """`mlx_lm.gptq`; the head in 6 bits, its default."""
    from mlx_lm.quant.gptq import gptq_quantize

    model, tokenizer, config = _loaded(source)
    model, config["quantization"] = gptq_quantize(model, mx.array(samples(source, PIECES)), 4, 64, 6, 64)  # type: ignore[no-untyped-call]
    _save(source, target, model, tokenizer, config)


def dynamic(source: Path, target: Path) -> None:
    """`mlx_lm.dynamic_quant`: 4 or 5 bits for each matrix, by one gradient."""
    from mlx_lm.quant.dynamic_quant import estimate_sensitivities, estimate_threshold
    from mlx_lm.utils import quantize_model

    model, tokenizer, config = _loaded(source)
    found = dict(estimate_sensitivities(model, mx.array(samples(source, PIECES)), *_LOW, *_HIGH))  # type: ignore[no-untyped-call]
    threshold = estimate_threshold(model, found, _DYNAMIC_BPW, *_LOW, *_HIGH)  # type: ignore[no-untyped-call]

    def predicate(path: str, module: Any) -> bool | dict[str, Any]:
        if not hasattr(module, "to_quantized"):
            return False
        return {"bits": _HIGH[0], "group_size": _HIGH[1]} if found[path] > threshold else True

    model, config = quantize_model(model, config, group_size=_LOW[1], bits=_LOW[0], quant_predicate=predicate)
    _save(source, target, model, tokenizer, config)


def dwq(source: Path, target: Path) -> None:
    """`mlx_lm.dwq`: 4 bits, scales and biases trained by distillation, once over all samples: fewer than its 2,048 texts by default."""
    from mlx_lm.quant.dwq import dwq_quantize
    from mlx_lm.utils import quantize_model

    np.random.seed(_SEED)
    mx.random.seed(_SEED)
    model, tokenizer, config = _loaded(source)
    texts = [(text, 0) for text in samples(source)]
    teacher = _loaded(source)[0]
    model, config = quantize_model(model, config, group_size=_LOW[1], bits=_LOW[0])

    def targets(batch: mx.array, index: int, split: str) -> mx.array:
        found: mx.array = teacher(batch)
        return found

    adam = optimizers.Adam(learning_rate=_RATE, bias_correction=True)
    dwq_quantize(model, targets, adam, texts[:-_VALID], texts[-_VALID:], _BATCH, LENGTH, _SEED)  # type: ignore[no-untyped-call]
    _save(source, target, model, tokenizer, config)


def _loaded(source: Path) -> tuple[Any, Any, dict[str, Any]]:
    """Model in float32, tokenizer, config."""
    from mlx_lm.utils import load

    model, tokenizer, config = load(str(source), lazy=True, return_config=True)  # type: ignore[misc]
    model.set_dtype(mx.float32)
    return model, tokenizer, config


def _save(source: Path, target: Path, model: Any, tokenizer: Any, config: dict[str, Any]) -> None:
    from mlx_lm.utils import save

    model.set_dtype(mx.bfloat16)
    save(target, str(source), model, tokenizer, config)
