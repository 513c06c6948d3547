"""OLMo 2 and 3."""

from __future__ import annotations

from ..architecture import SANDWICH, GGUFArchitecture, TensorTable
from ..base_config import Config, Source, dense_config, windowed_layers


def _olmo(source: Source) -> Config:
    """OLMo 2, or with windows OLMo 3, which stretches the rope of the layers without a window only."""
    hparams = source.hparams
    window = hparams.integer("attention.sliding_window", 0, low=0)
    config = dense_config(source, "olmo3" if window else "olmo2") | {"attention_bias": False}
    if not window:
        return config
    scaling, theta = config.pop("rope_scaling"), config.pop("rope_theta")
    local = hparams.positive("rope.freq_base_swa", theta)
    ropes = {
        "full_attention": {"rope_type": "default", **(scaling or {}), "rope_theta": theta},
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
    }
    types = windowed_layers(source, config["num_hidden_layers"], 4)
    return config | {"rope_parameters": ropes, "sliding_window": window, "layer_types": types}


ARCHITECTURES = {
    "olmo2": GGUFArchitecture(_olmo, TensorTable(SANDWICH)),
}
