"""The models that are compared: every block type at real widths, in few layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .random_model import Sizes, TypeOf

SMALL = Sizes(hidden=896, inner=4864, layers=12, heads=14, kv_heads=2)
"""Half the layers of Qwen2.5 0.5B. Its 896 columns are not divisible into blocks of 256."""
LARGE = Sizes(hidden=1536, inner=8960, layers=6, heads=12, kv_heads=2)
"""A fifth of the layers of Qwen2.5 1.5B."""

KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
_BLOCKS_OF_32 = KINDS[:5]


@dataclass(frozen=True, slots=True)
class Model:
    sizes: Sizes
    type_of: TypeOf


def models() -> Mapping[str, Model]:
    """By name, such as "1536 Q4_K": the width, and the type of all matrices."""
    small = {f"{SMALL.hidden} {kind}": Model(SMALL, _always(kind)) for kind in _BLOCKS_OF_32}
    large = {f"{LARGE.hidden} {kind}": Model(LARGE, _always(kind)) for kind in KINDS}
    return {**small, f"{SMALL.hidden} Q4_K_M": Model(SMALL, _narrow_q4_k_m), **large}


def _always(kind: str) -> TypeOf:
    return lambda name, layer: kind


def _narrow_q4_k_m(name: str, layer: int) -> str:
    """llama.cpp's choice of types for Q4_K_M if only `ffn_down` has columns divisible by 256."""
    better = layer % 2 == 1
    if name == "ffn_down":
        return "Q6_K" if better else "Q4_K"
    return "Q8_0" if name == "token_embd" or (name == "attn_v" and better) else "Q5_0"
