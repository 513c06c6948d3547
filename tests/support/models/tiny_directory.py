"""A complete tiny model directory: weights of a golden architecture, a tokenizer of 96 characters, and a chat template."""

from __future__ import annotations

import json
import shutil
import string
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
from tokenizers import Tokenizer, decoders, models

GOLDEN = Path(__file__).parents[2] / "golden" / "arch"

CHARACTERS = ["<pad>", "<s>", "</s>", *sorted(set(string.printable) - set("\t\r\x0b\x0c"))][:96]

JSON_CHARACTERS = [*CHARACTERS[:3], *sorted(set(string.printable) - set("\t\r\x0b\x0c~^`"))]
"""As many, with all that JSON needs."""

CHAT_TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"


def tiny_directory(
    target: Path,
    architecture: str = "llama",
    *,
    chat: bool = True,
    eos: bool = True,
    context: int | None = None,
    rounded: bool = False,
    characters: Sequence[str] = CHARACTERS,
) -> Path:
    """Write the directory and return it. `eos=False` leaves the model without an end token, so that answers run to their length.
    `context` overrides the length that the config allows. `rounded`: the weights are in bfloat16, so that they are loaded without a note
    on every device; otherwise in float32."""
    target.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(GOLDEN / architecture / name, target / name)
    if rounded:
        weights = mx.load(str(GOLDEN / architecture / "model.safetensors"))
        mx.save_safetensors(str(target / "model.safetensors"), {name: array.astype(mx.bfloat16) for name, array in weights.items()})
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(characters)}, merges=[], unk_token="<pad>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    tokenizer.save(str(target / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "pad_token": "<pad>"}
    settings |= {"eos_token": "</s>"} if eos else {}
    settings |= {"chat_template": CHAT_TEMPLATE} if chat else {}
    (target / "tokenizer_config.json").write_text(json.dumps(settings))
    changes = ({} if eos else {"eos_token_id": None}) | ({} if context is None else {"max_position_embeddings": context})
    if changes:
        config = json.loads((target / "config.json").read_text())
        (target / "config.json").write_text(json.dumps(config | changes))
    return target
