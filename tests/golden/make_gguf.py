"""Tiny random models, one per GGUF architecture: transformers' float32 logits, and the file that llama.cpp's own converter makes.

Run with a Python that has torch, transformers and gguf, and with the root of a llama.cpp checkout (one that has `conversion/`):
`python make_gguf.py LLAMA_CPP [NAME...]` writes gguf/<name>.gguf and gguf/<name>.npz (ids [72], logits [72, 96]).
What llama.cpp has in code rather than in the file (which layers have a window, which have no rope) is as it assumes.
"""

from __future__ import annotations

import json
import pathlib
import sys
import tempfile
from typing import Any

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from gguf_cases import BASE, CASES, FULL, LETTERS, LINEAR, PUBLISHED, VOCAB

OUT = pathlib.Path(__file__).parent / "gguf"
TOKENS = 72


def model_of(name: str, settings: dict[str, Any]) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {**BASE, **settings}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    torch.manual_seed(sum(map(ord, name)))
    if config.model_type == "mistral4":  # known to transformers as the text part of others only
        from transformers import Mistral4ForCausalLM

        model = Mistral4ForCausalLM._from_config(config, attn_implementation="eager").float().eval()
    else:
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for key, buffer in model.named_buffers():
            if "bias" in key:
                buffer.normal_(0, 0.1)
            if "layer_scalar" in key:
                buffer.uniform_(0.6, 1.4)
        for key, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.15)
            elif "norm" in key:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.normal_(0, 0.1)
    return model


def write_vocabulary(converter: Any) -> None:
    writer = converter.gguf_writer
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*(chr(33 + i) for i in range(VOCAB - 3)), '!"', "<a>", "<b>"])
    writer.add_token_types([1] * VOCAB)
    writer.add_token_merges(['! "'])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)


def publish(directory: pathlib.Path) -> None:
    """Add keys and tensor names that publishers write and transformers does not; llama.cpp's converter needs them."""
    import torch
    from safetensors.torch import load_file, save_file

    path, weights = directory / "config.json", directory / "model.safetensors"
    config = json.loads(path.read_text())
    config |= PUBLISHED.get(config["model_type"], {})
    if config["model_type"] == "granitemoehybrid":
        config["layer_types"] = ["attention" if kind == FULL else "mamba" for kind in config["layer_types"]]
    if config["model_type"] == "nemotron_h":
        config["hybrid_override_pattern"] = "".join(LETTERS[kind] for kind in config["layers_block_type"])
        if "E" not in config["hybrid_override_pattern"]:
            experts = ("n_routed", "n_shared", "num_experts", "topk", "moe_")
            config = {key: value for key, value in config.items() if key != "n_group" and not key.startswith(experts)}
    if config["model_type"] == "gemma4_text":
        vocabulary = {"model": {"vocab": dict.fromkeys(map(str, range(VOCAB)))}, "added_tokens": []}
        (directory / "tokenizer.json").write_text(json.dumps(vocabulary))
    if config["model_type"] == "kimi_linear":
        kinds = config.pop("layer_types")
        config["linear_attn_config"] = {
            "full_attn_layers": [layer for layer, kind in enumerate(kinds, 1) if kind == FULL],
            "kda_layers": [layer for layer, kind in enumerate(kinds, 1) if kind == LINEAR],
            "head_dim": config["linear_head_dim"],
            "num_heads": config["linear_num_heads"],
            "short_conv_kernel_size": config["linear_conv_kernel_dim"],
        }
        tensors: dict[str, torch.Tensor] = load_file(weights)
        save_file({name.replace("layers.0.block_sparse_moe", "layers.0.mlp"): tensor for name, tensor in tensors.items()}, weights)
    path.write_text(json.dumps(config))


def class_for(directory: pathlib.Path) -> Any:
    """The class that llama.cpp has for the architecture, without its wrapper."""
    from conversion import get_model_class
    from conversion.base import ModelBase

    config = ModelBase.load_hparams(directory, False)
    if config["model_type"] in ("ministral3", "mistral4"):
        from conversion.mistral3 import Mistral3Model

        return Mistral3Model.Mistral4Model if config["model_type"] == "mistral4" else Mistral3Model.Ministral3Model
    return get_model_class(config["architectures"][0])


def convert(directory: pathlib.Path, destination: pathlib.Path) -> None:
    """By the class that llama.cpp has for the architecture; only its tokenizer, which these models lack, is replaced."""
    import gguf
    from conversion.base import TextModel

    kind = class_for(directory)
    replaced = {"set_vocab": write_vocabulary, "no_mtp": True, "model_arch": kind.model_arch}
    if "Gemma3" in kind.__name__:
        replaced["modify_tensors"] = lambda self, data, name, bid: TextModel.modify_tensors(self, data + self.norm_shift(name), name, bid)
    kind = type(kind.__name__, (kind,), replaced)
    # transformers would fill in what a config does not say, experts for example.
    hparams = json.loads((directory / "config.json").read_text()) if "Nemotron" in kind.__name__ else None
    kind(directory, gguf.LlamaFileType.ALL_F32, destination, eager=True, hparams=hparams).write()


def main(checkout: str, names: list[str]) -> None:
    sys.path[:0] = [checkout, checkout + "/gguf-py"]
    import torch

    OUT.mkdir(exist_ok=True)
    ids = torch.randint(3, VOCAB, (1, TOKENS), generator=torch.Generator().manual_seed(11))
    for name in names or CASES:
        model = model_of(name, CASES[name])
        with torch.no_grad():
            logits = model(ids).logits[0].numpy().astype(np.float32)
        with tempfile.TemporaryDirectory() as directory:
            model.save_pretrained(directory)
            publish(pathlib.Path(directory))
            convert(pathlib.Path(directory), OUT / f"{name}.gguf")
        np.savez_compressed(OUT / f"{name}.npz", ids=ids[0].numpy().astype(np.int32), logits=logits)
        sizes = [(OUT / f"{name}.{end}").stat().st_size for end in ("gguf", "npz")]
        sys.stdout.write(f"{name}: largest logit {np.abs(logits).max():.2f}, bytes {sizes}\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
