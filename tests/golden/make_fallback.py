"""Logits of transformers 5.23 for tiny models that run on mlx-lm's graphs here: fallback/<model_type>.npz.

Run with a Python that has torch and transformers, from `tests`: `python golden/make_fallback.py`. A file holds the config, the names and
shapes of the checkpoint's tensors, the tokens and the logits; the tensors themselves are made from their names.
"""

from __future__ import annotations

import json
import pathlib
import sys
import tempfile

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from support.fallback.cases import BASE, CASES
from support.fallback.golden import GOLDEN, KINDS, made_tensor

SMALL = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
TOKENS = 60


def main() -> None:
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    GOLDEN.mkdir(exist_ok=True)
    ids = np.random.default_rng(11).integers(3, SMALL["vocab_size"], TOKENS)
    for kind in KINDS:
        settings = {**BASE, **CASES[kind][0], **SMALL, **KINDS[kind]}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings)).float()
        with tempfile.TemporaryDirectory() as folder:
            place = pathlib.Path(folder)
            model.save_pretrained(place)
            shapes = {name: tuple(tensor.shape) for name, tensor in load_file(place / "model.safetensors").items()}
            made = {name: torch.from_numpy(made_tensor(name, shape)) for name, shape in shapes.items()}
            save_file(made, place / "model.safetensors", metadata={"format": "pt"})
            again = AutoModelForCausalLM.from_pretrained(place, attn_implementation="eager", dtype=torch.float32).eval()
            config = (place / "config.json").read_text()
        with torch.no_grad():
            logits = again(torch.from_numpy(ids)[None], use_cache=False).logits[0].numpy()
        tensors = json.dumps({name: list(shape) for name, shape in shapes.items()})
        np.savez_compressed(GOLDEN / f"{kind}.npz", config=config, tensors=tensors, ids=ids, logits=logits.astype(np.float32))
        sys.stdout.write(f"{kind}: largest logit {np.abs(logits).max():.2f}, {(GOLDEN / f'{kind}.npz').stat().st_size} bytes\n")


if __name__ == "__main__":
    main()
