"""Reads adapters of PEFT: adapter_config.json and adapter_model.safetensors.

Source: `tuners/lora/config.py`, `layer.py` and `dora.py` of https://github.com/huggingface/peft.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import AdapterError
from ..loading.safetensors import SafetensorsFile
from ..util.name_pattern import Endings, PatternError, Steps, is_ending
from ..util.typed_reader import TypedReader, shown
from .update import CONFIG, Update, updates_in

WEIGHTS = "adapter_model.safetensors"
_TENSOR = re.compile(
    r"(?!.*modules_to_save)(?:base_model\.model\.)?(?P<module>.+)\.(?P<part>lora_A|lora_B|lora_magnitude_vector)(?:\.default)?(?:\.weight)?"
)
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_WITHOUT_EFFECT = (
    *(
        "auto_mapping",
        "base_model_class",
        "base_model_name_or_path",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
    ),
    *("fan_in_fan_out", "inference_mode", "layers_pattern", "loftq_config", "lora_dropout", "megatron_core", "parent_library"),
    *("peft_version", "qalora_group_size", "revision", "runtime_config", "task_type"),
)
"""Keys about training and purpose. `fan_in_fan_out` is the layout of the base model's matrices; factors have a single layout."""
_CHANGING = {
    "modules_to_save": "whole modules that replace the model's",
    "lora_bias": "biases of its own",
    "layer_replication": "layers that are repeated",
    "target_parameters": "updates of parameters such as stacked experts",
    "trainable_token_indices": "embeddings of its own",
    "alora_invocation_tokens": "updates that begin at certain tokens (aLoRA)",
    "use_qalora": "factors over groups of inputs (QALoRA)",
}
_PLAIN_STARTS = ("gaussian", "eva", "orthogonal", "true", "false")


class PEFTConfigReader(TypedReader):
    """Typed reader of an adapter's config."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.path = path

    def error(self, key: str, what: str) -> AdapterError:
        return AdapterError(f"{self.path}: {key} {what}")


def peft_updates(path: Path, config: Mapping[str, Any], file: SafetensorsFile) -> Iterator[Update]:
    """Yield the updates of an adapter. Raises `AdapterError` for tensors that cannot be applied."""
    return updates_in(path, file, _PEFTFormat(path / CONFIG, config))


class _PEFTFormat:
    """Implements `AdapterFormat`. Raises `AdapterError` for unsupported changes of the model."""

    tensor = _TENSOR
    parts = "lora_A", "lora_B", "lora_magnitude_vector"
    transposed = False

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        reader = PEFTConfigReader(path, config)
        if reader.text("peft_type", "LORA") != "LORA":
            raise reader.error("peft_type", f"is {shown(config['peft_type'])}: only LORA is understood")
        if reader.text("bias", "none") != "none":
            raise reader.error("bias", f"is {shown(config['bias'])}: biases of adapters are not applied")
        self._path = path
        self._rank, self._alpha = reader.integer("r", 8), reader.number("lora_alpha", 8)
        steps = Steps()
        self._ranks = _patterns(reader, "rank_pattern", steps)
        self._alphas = _patterns(reader, "alpha_pattern", steps)
        self._rslora = reader.boolean("use_rslora", False)
        self.dora = reader.boolean("use_dora", False)
        self._targets = reader.take("target_modules")
        only = reader.take("layers_to_transform")
        self._layers = None if only is None else only if isinstance(only, list) else [only]
        _check_start(reader)
        _check_rest(reader)

    def rank(self, module: str) -> int:
        return int(self._value(module, self._ranks, self._rank))

    def _value(self, module: str, endings: Endings[float], otherwise: float) -> float:
        try:
            return endings.value(module, otherwise)
        except PatternError as error:
            raise AdapterError(f"{self._path}: {error}: write the names of its modules") from None

    def scale(self, module: str) -> float:
        alpha, rank = self._value(module, self._alphas, self._alpha), self.rank(module)
        return alpha / (math.sqrt(rank) if self._rslora else rank)

    def left_out(self, module: str) -> str:
        layer = _LAYER.search(module)
        if self._layers is not None and (layer is None or int(layer[1]) not in self._layers):
            return f"is for a layer that is not among layers_to_transform of {CONFIG}"
        return "" if is_ending(module, self._targets) else f"is for a module that is not among target_modules of {CONFIG}"


def _patterns(reader: PEFTConfigReader, key: str, steps: Steps) -> Endings[float]:
    found = reader.take(key) or {}
    valid = isinstance(found, dict) and all(type(value) in (int, float) and value > 0 and math.isfinite(value) for value in found.values())
    if not valid:
        raise reader.bad(key, found, "an object of names and numbers above 0")
    try:
        return Endings(found, steps)
    except PatternError as error:
        raise reader.error(key, f"has what cannot be matched: {error}: write the names of its modules") from None


def _check_start(reader: PEFTConfigReader) -> None:
    """Refuse initialisations that also change the base matrices (PiSSA, OLoRA, CorDA, LoftQ)."""
    start = reader.take("init_lora_weights", True)
    if str(start).lower() not in _PLAIN_STARTS:
        advice = "save it with path_initial_model_for_weight_conversion"
        raise reader.error("init_lora_weights", f"is {shown(start)}, which changes the model's matrices too: {advice}")


def _check_rest(reader: PEFTConfigReader) -> None:
    for key in _WITHOUT_EFFECT:
        reader.take(key)
    for key, value in reader.untaken():
        if value not in (None, False, [], {}, ""):
            raise reader.error(key, f"is {shown(value)}: {_CHANGING.get(key, 'it is not understood, and may change what is computed')}")
