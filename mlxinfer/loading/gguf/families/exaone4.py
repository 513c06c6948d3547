"""EXAONE 4."""

from __future__ import annotations

from ..architecture import SANDWICH, GGUFArchitecture, TensorTable
from ..base_config import Config, Source, dense_config, windowed_layers


def _exaone4(source: Source) -> Config:
    config = dense_config(source, "exaone4")
    window, layers = source.hparams.integer("attention.sliding_window", 0, low=0), config["num_hidden_layers"]
    types = windowed_layers(source, layers, 4) if window else ["full_attention"] * layers
    return config | {"sliding_window": window or None, "layer_types": types}


ARCHITECTURES = {
    "exaone4": GGUFArchitecture(_exaone4, TensorTable(SANDWICH)),
}
