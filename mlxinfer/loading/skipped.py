"""Tensors of a checkpoint that no graph requests, and the reasons."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..models.vlm_text import integer_setting

OF_TOWERS = "only the text model is used"
"""Reason for skipping a vision tower."""
OF_AUDIO = "audio is not understood"
"""Reason for skipping an audio tower."""
OF_HEADS = "head that predicts several tokens, not used"
"""Reason for skipping the tensors of a draft head."""
_OF_LAYERS = "layer that predicts several tokens, not used"
_OF_SHARED = "keys and values of layers that read those of an earlier layer"

_ACTIVATIONS = (
    "activation_scale|input_scale|input_global_scale|input_zero_point|output_scale|[qkv]_scale|kv_scale|input_scale_ub|prob_scale"
)
_TOWERS = "vision_(tower|model|embedder|encoder|projector)|visual|multi_modal_projector|embed_vision|mlp1|connector"
_AUDIO = "audio_(tower|model|embedder|encoder|projector)|embed_audio"
_SKIPPED = (
    (re.compile(r"rotary_emb\.inv_freq$"), "computed from the config"),
    (re.compile(rf"\.({_ACTIVATIONS})$"), "scale of activations, which are not quantized here"),
    (re.compile(r"(^|\.)mtp\."), OF_HEADS),
    (re.compile(rf"(^|\.)({_AUDIO})\."), OF_AUDIO),
    (re.compile(rf"(^|\.)({_TOWERS})\."), OF_TOWERS),
)
_COMPUTED = re.compile(r"(rotary_emb\.inv_freq|position_ids)$")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_KEYS_AND_VALUES = re.compile(r"\.self_attn\.[kv]_(proj|norm)\.")


def reason_to_skip(name: str, config: Mapping[str, Any]) -> str | None:
    """The reason why a tensor that the graph did not request may be left out, or None."""
    if name == "lm_head.weight" or name.endswith(".lm_head.weight"):
        return "the head is tied to the embedding"
    reason = next((reason for pattern, reason in _SKIPPED if pattern.search(name)), None)
    layer, depth = _LAYER.search(name), integer_setting(config, "num_hidden_layers")
    if reason or not layer or depth is None:
        return reason
    if integer_setting(config, "num_nextn_predict_layers") and int(layer[1]) >= depth:
        return _OF_LAYERS
    shared = integer_setting(config, "num_kv_shared_layers") or 0
    return _OF_SHARED if int(layer[1]) >= depth - shared and _KEYS_AND_VALUES.search(name) else None


def reason_to_skip_in_tower(name: str, config: Mapping[str, Any]) -> str | None:
    """The reason why a tensor of a vision tower that the tower did not request may be left out, or None."""
    return "computed from the config" if _COMPUTED.search(name) else None
