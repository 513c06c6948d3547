"""SigLIP, the encoder of Idefics 3, SmolVLM, Gemma 3 and LFM2-VL: pre-norm blocks with biases, positions added once.

Source: modeling_siglip.py and modeling_siglip2.py of transformers.
"""

from __future__ import annotations

import mlx.core as mx

from ...nn.linear import Linear
from ...nn.mlp import PlainMLP
from ...nn.norms import LayerNorm
from ...nn.weights import Weights
from ...util.dataclass import dataclass
from .parts import VisionBlock, activation, load_attention
from .tower import PartStages, VisionReader


@dataclass(frozen=True, slots=True)
class SiglipSizes:
    """Sizes of the encoder."""

    hidden: int
    inner: int
    """Channels inside the MLP."""
    layers: int
    heads: int
    eps: float
    activation: str

    @classmethod
    def read(cls, reader: VisionReader, *, hidden: int = 768, heads: int = 12) -> SiglipSizes:
        """Read the sizes; the arguments are the family's defaults."""
        reader.only("num_channels", 3)
        width, count = reader.integer("hidden_size", hidden), reader.count("num_attention_heads", heads)
        if width % count:
            raise reader.bad("num_attention_heads", count, f"a divisor of hidden_size ({width})")
        return cls(
            width,
            reader.integer("intermediate_size", 3072),
            reader.count("num_hidden_layers", 12),
            count,
            reader.number("layer_norm_eps", 1e-6),
            reader.text("hidden_act", "gelu_pytorch_tanh"),
        )


class SiglipEncoder:
    """Blocks and the last norm."""

    def __init__(self, blocks: list[VisionBlock], norm: LayerNorm) -> None:
        self.blocks, self.norm = blocks, norm

    @classmethod
    def load(cls, weights: Weights, name: str, sizes: SiglipSizes) -> SiglipEncoder:
        """Load `encoder.layers` and `post_layernorm` under the prefix `name`."""
        act, hidden = activation(sizes.activation), sizes.hidden
        blocks = []
        for layer in range(sizes.layers):
            place = f"{name}encoder.layers.{layer}"
            parts = [f"{place}.self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "out_proj")]
            up = Linear.load(weights, f"{place}.mlp.fc1", sizes.inner, hidden, bias=True)
            down = Linear.load(weights, f"{place}.mlp.fc2", hidden, sizes.inner, bias=True)
            norms = [LayerNorm.load_with_bias(weights, f"{place}.layer_norm{k}", hidden, sizes.eps) for k in (1, 2)]
            attention = load_attention(weights, parts, [hidden] * 4, hidden // sizes.heads, bias=True)
            blocks.append(VisionBlock(attention, PlainMLP(up, down, act), (norms[0], norms[1])))
        return cls(blocks, LayerNorm.load_with_bias(weights, f"{name}post_layernorm", hidden, sizes.eps))

    def stages(self, x: mx.array, batch: int) -> PartStages:
        """`[batch * n, hidden]` to the same shape."""
        for block in self.blocks:
            x = block(x, batch)
            yield x
        return self.norm(x)
