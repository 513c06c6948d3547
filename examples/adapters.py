"""One model, several adapters in one batch. The adapters here are random numbers, large enough to change what is said, and no more."""

import json
import tempfile
from pathlib import Path

import mlx.core as mx

from mlxinfer import LLM, SamplingParams

SCALE = 0.15
"""Standard deviation of the numbers."""


def write_random_adapter(folder: Path, hidden: int, layers: int, seed: int) -> Path:
    """An adapter of PEFT's format for the output projections of attention."""
    folder.mkdir()
    keys, tensors = iter(mx.random.split(mx.random.key(seed), 2 * layers)), {}
    for layer in range(layers):
        name = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        tensors[f"{name}.lora_A.weight"] = mx.random.normal((4, hidden), key=next(keys)) * SCALE
        tensors[f"{name}.lora_B.weight"] = mx.random.normal((hidden, 4), key=next(keys)) * SCALE
    mx.save_safetensors(str(folder / "adapter_model.safetensors"), tensors)
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["o_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


with tempfile.TemporaryDirectory() as folder:
    adapters = {name: write_random_adapter(Path(folder) / name, 576, 30, seed) for seed, name in enumerate(["one", "two"])}
    with LLM("smollm2", adapters=adapters) as llm:
        names = [None, "one", "two"]
        params = [SamplingParams(temperature=0, max_tokens=16, adapter=name) for name in names]
        answers = llm.generate(["Once upon a time"] * 3, params)  # one batch: each row has the adapter of its request
        for name, answer in zip(names, answers):
            print(f"{name or 'the model itself'}: {answer.text!r}")
        assert len({answer.text for answer in answers}) == 3, "adapters are at work"
