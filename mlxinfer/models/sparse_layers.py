"""Feed-forward layers of DeepSeek V3's kind (arXiv:2412.19437): first dense, then routed and shared experts."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx

from ..nn.activations import gated
from ..nn.linear import Linear
from ..nn.mlp import GatedMLP
from ..nn.moe import MixtureOfExperts, SharedExpert
from ..nn.routes import Route, biased_route
from ..nn.weights import Weights
from .block import FeedForward, gated_mlp
from .common import Sizes
from .config_reader import ConfigReader
from .experts import PROJECTIONS, load_bias, load_experts, read_chosen_count, read_groups


class SparseLayers:
    """Feed-forward layers of a model: dense ones, and grouped experts selected by sigmoid and bias or by probabilities."""

    def __init__(
        self,
        reader: ConfigReader,
        sizes: Sizes,
        *,
        scores: str = "sigmoid",
        ranked: int = 2,
        normalizes: bool = True,
        count: int = 128,
        chosen: int = 8,
        inner: int = 1408,
        shared: int = 1,
        dense: int = 1,
        groups: tuple[int, int] = (1, 1),
        scale: float = 1.0,
        kinds: list[str] | None = None,
        parts: Mapping[str, str] = PROJECTIONS,
    ) -> None:
        """Read the settings; the arguments are the family's defaults.

        `kinds` lists "dense" or "sparse" per layer. `ranked` is the number of scores that rank a group. `normalizes` is True if the family
        reads `norm_topk_prob`. `parts` are the names of an expert's matrices if stored separately.
        """
        self.sizes = sizes
        self.gate = gated(sizes.activation)
        self.scores = scores
        self.count = reader.count("n_routed_experts", count)
        reader.only("num_local_experts", self.count)
        reader.only("num_routed_experts", self.count)
        known = reader.values.get("num_experts_per_tok") is not None
        self.chosen = read_chosen_count(reader, chosen, self.count) if known else chosen
        reader.skip("num_experts_per_tok")
        self.inner = reader.integer("moe_intermediate_size", inner)
        self.shared = (reader.optional_integer("n_shared_experts", shared, low=0) or 0) * self.inner
        self.groups, self.kept = read_groups(reader, self.count, *groups)
        first = reader.integer("first_k_dense_replace", dense, low=0)
        self.kinds = kinds or ["dense" if layer < first else "sparse" for layer in range(sizes.layers)]
        self.normalized = reader.boolean("norm_topk_prob", True) and normalizes
        self.ranked = ranked
        self.parts = parts
        self.scale = reader.number("routed_scaling_factor", scale)
        reader.only("moe_layer_freq", 1)
        reader.only("scoring_func", scores)
        reader.only("topk_method", *(("noaux_tc",) if normalizes else ("greedy", "group_limited_greedy")))
        if not normalizes and reader.values.get("topk_method", "greedy") == "greedy":
            self.kept = self.groups
        reader.skip("aux_loss_alpha", "seq_aux")

    def load(self, weights: Weights, layer: int) -> FeedForward:
        """Load the feed-forward layer of a layer or, after the last one, of a draft head."""
        if layer < self.sizes.layers and self.kinds[layer] == "dense":
            return gated_mlp(weights, f"model.layers.{layer}", self.sizes, self.gate)
        name, hidden = f"model.layers.{layer}.mlp", self.sizes.hidden
        router = Linear.load(weights, f"{name}.gate", self.count, hidden, quantizable=False)
        shape = (self.count, self.inner, hidden)
        experts = load_experts(weights, f"{name}.switch_mlp", f"{name}.experts", shape, self.gate, self.parts)
        if not self.shared:
            return MixtureOfExperts(router, self._route(weights, name), experts)
        shared = GatedMLP.load(weights, f"{name}.shared_experts", hidden, self.shared, self.gate)
        return MixtureOfExperts(router, self._route(weights, name), experts, SharedExpert(shared))

    def _route(self, weights: Weights, name: str) -> Route:
        bias = None if self.scores == "softmax" else _load_bias(weights, name, self.count)
        return biased_route(
            self.chosen,
            bias,
            self.scores,
            normalized=self.normalized,
            added=1e-20,
            scale=self.scale,
            groups=self.groups,
            kept=self.kept,
            ranked=self.ranked,
        )


def _load_bias(weights: Weights, name: str, count: int) -> mx.array:
    return load_bias(weights, f"{name}.gate.e_score_correction_bias", count, f"{name}.e_score_correction_bias")
