"""Feed-forward layers in the manner of DeepSeek V3 (arXiv:2412.19437): dense at first, then experts next to shared ones."""

from __future__ import annotations

from ..nn.activations import gated
from ..nn.linear import Linear
from ..nn.mlp import GatedMLP
from ..nn.moe import BiasedRoute, MixtureOfExperts, SharedExpert
from ..nn.weights import Weights
from .block import FeedForward, gated_mlp
from .common import Sizes
from .config_reader import ConfigReader
from .experts import load_bias, load_experts, read_chosen_count, read_groups


class SparseLayers:
    """The feed-forward layers of models in the manner of DeepSeek V3 (arXiv:2412.19437): dense at first, then experts from groups, chosen
    by a sigmoid and a bias, next to shared ones."""

    def __init__(self, reader: ConfigReader, sizes: Sizes) -> None:
        self.sizes = sizes
        self.gate = gated(sizes.activation)
        self.count = reader.count("n_routed_experts", 128)
        reader.only("num_local_experts", self.count)
        self.chosen = read_chosen_count(reader, 8, self.count)
        self.inner = reader.integer("moe_intermediate_size", 1408)
        self.shared = reader.integer("n_shared_experts", 1, low=0) * self.inner
        self.groups, self.kept = read_groups(reader, self.count)
        self.dense = reader.integer("first_k_dense_replace", 1, low=0)
        self.normalized = reader.boolean("norm_topk_prob", True)
        self.scale = reader.number("routed_scaling_factor", 1.0)
        reader.only("moe_layer_freq", 1)
        reader.only("scoring_func", "sigmoid")
        reader.only("topk_method", "noaux_tc")

    def load(self, weights: Weights, layer: int) -> FeedForward:
        if layer < self.dense:
            return gated_mlp(weights, f"model.layers.{layer}", self.sizes, self.gate)
        name, hidden = f"model.layers.{layer}.mlp", self.sizes.hidden
        router = Linear.load(weights, f"{name}.gate", self.count, hidden, quantizable=False)
        bias: mx.array = load_bias(weights, f"{name}.gate.e_score_correction_bias", self.count)
        route = BiasedRoute(
            self.chosen, bias, normalized=self.normalized, added=1e-20, scale=self.scale, groups=self.groups, kept=self.kept
        )
        experts = load_experts(weights, f"{name}.switch_mlp", f"{name}.experts", (self.count, self.inner, hidden), self.gate)
        if not self.shared:
            return MixtureOfExperts(router, route, experts)
        shared = GatedMLP.load(weights, f"{name}.shared_experts", hidden, self.shared, self.gate)
        return MixtureOfExperts(router, route, experts, SharedExpert(shared))
