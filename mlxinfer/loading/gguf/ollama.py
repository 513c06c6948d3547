"""Converts GGUF files in the form of Ollama's converters to llama.cpp's form, which the rest of this folder reads.

Sources: `convert/` of https://github.com/ollama/ollama, in all its versions, for the contents of files. Its graphs (`model/models/`,
until May 2026) give their meaning and the defaults of missing keys. `llama/compat/` lists the published files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from ...errors import UnsupportedModelError
from ...util.typed_reader import shown
from .files import GGUFFiles
from .ollama_form import RENAMED, OllamaForm
from .reader import TensorInfo

_REFUSED = {
    "glmocr": "whose queries and keys are in the order of a rope for images",
    "deepseekocr": "which reads pictures of text",
    "llama4": "which has no graph for GGUF here",
    "mllama": "which has no graph for GGUF here",
    "gemma3n": "which has no graph for GGUF here",
    "laguna": "which has no graph for GGUF here",
}
"""Ollama's names of unsupported models, with the reason."""


def from_ollama(files: GGUFFiles) -> bool:
    """Convert the metadata and tensor names from Ollama's form, if they have it, to llama.cpp's. True for a model of images or sound, of
    which only the text model stays.

    Raises `UnsupportedModelError` for files that no graph here supports. A file in llama.cpp's form stays unchanged.
    """
    name = files.metadata.get("general.architecture")
    if not isinstance(name, str):
        return False
    if name in _REFUSED:
        raise UnsupportedModelError(
            f"{files.path}: made by Ollama from a model of the architecture {name}, {_REFUSED[name]}; give the model's safetensors instead"
        )
    form = OllamaForm(files, name)
    form.name_the_architecture()
    form.move_keys()
    names = list(dict.fromkeys((name, form.architecture)))
    for fix in [_FIXES[known] for known in names if known in _FIXES]:
        fix(form)
    for known in names:
        form.rename_tensors(RENAMED.get(known, {}))
    form.mend_tokenizer()
    form.settle()
    return form.senses


def _gemma3(form: OllamaForm) -> None:
    """Add constants of Ollama's graph to Gemma 3's keys: the stretched rope of 4B, 12B and 27B; 1B has no cap of the logits."""
    if form.info("dense.0.weight"):
        raise UnsupportedModelError(
            f"{form.files.path}: made by Ollama from EmbeddingGemma, which makes vectors; give the model's safetensors instead"
        )
    old = form.by_ollama or form.senses or "attention.layer_norm_rms_epsilon" not in form.hyper
    defaults = {
        "attention.key_length": 256,
        "attention.value_length": 256,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4,
    }
    form.hyper = defaults | form.hyper
    windows = form.number("attention.sliding_window") < form.number("context_length")
    if old and windows and form.number("block_count") == _GEMMA3_1B:
        form.drop("final_logit_softcapping")
    if old and windows and form.number("block_count") in _GEMMA3_STRETCHED and form.number("rope.scaling.factor", 1.0) == 1.0:
        form.hyper |= {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    if old and form.text("rope.scaling.type") == "yarn":
        form.hyper = {"rope.scaling.yarn_beta_fast": 64.0, "rope.scaling.yarn_attn_factor": 1.0} | form.hyper
    if old:
        form.others.setdefault("tokenizer.chat_template", _GEMMA3_CHAT)


_GEMMA3_CHAT = (
    "{{ bos_token }}{% set system = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}"
    "{% for message in (messages[1:] if system else messages) %}"
    "<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}\n"
    "{{ system if loop.first else '' }}{{ message.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
"""The chat format of Google's model card. The checkpoint keeps it in a file that Ollama's converter did not read."""
_GEMMA3_1B = 26
_GEMMA3_STRETCHED = (34, 48, 62)
"""Layers of the published models."""


def _gemma4(form: OllamaForm) -> None:
    """Add defaults, and correct the type of a tokenizer that is called SentencePiece and has merges."""
    defaults = {"attention.key_length": 512, "attention.key_length_swa": 256, "attention.layer_norm_rms_epsilon": 1e-6}
    form.hyper = defaults | form.hyper
    if form.others.get("tokenizer.ggml.model") == "llama" and "tokenizer.ggml.merges" in form.others:
        form.others["tokenizer.ggml.model"] = "gemma4"


def _gpt_oss(form: OllamaForm) -> None:
    gate, both = form.of_a_layer("ffn_gate_exps.weight"), form.of_a_layer("ffn_gate_up_exps.weight")
    if gate is not None or both is not None:
        form.hyper.setdefault("expert_feed_forward_length", _rows(gate) if gate is not None else _rows(both) // 2)
    form.hyper.setdefault("rope.scaling.type", "yarn")


def _mistral3(form: OllamaForm) -> None:
    """Drop the scale of single channels, which must be 1 as in llama.cpp's form."""
    if "rope.scaling.mscale" not in form.hyper:
        return
    if form.number("rope.scaling.mscale") != 1 or not form.number("rope.scaling.yarn_log_multiplier"):
        raise form.unsupported("rope.scaling.mscale", f"= {shown(form.hyper['rope.scaling.mscale'])}")
    form.drop("rope.scaling.mscale")


def _glm4_moe_lite(form: OllamaForm) -> None:
    """Drop the keys with `_mla`: Ollama's keys without it have the meaning of llama.cpp's with it."""
    form.drop("attention.key_length_mla", "attention.value_length_mla")


def _deepseek(form: OllamaForm) -> None:
    if form.number("attention.q_lora_rank", 1) == 0:
        form.drop("attention.q_lora_rank")


def _expert_width(form: OllamaForm) -> None:
    gate = form.of_a_layer("ffn_gate_exps.weight")
    if gate is not None:
        form.hyper.setdefault("expert_feed_forward_length", _rows(gate))


def _delta_net(form: OllamaForm) -> None:
    """Check the order of value heads: Qwen 3.5's files must have llama.cpp's, Qwen3-Next's the checkpoint's."""
    expected = form.architecture != "qwen3next"
    order = form.hyper.pop("ssm.v_head_reordered", expected)
    if order is not expected:
        raise form.unsupported("ssm.v_head_reordered", f"= {shown(order)}")
    counts = form.hyper.get("attention.head_count_kv")
    if isinstance(counts, np.ndarray) and counts.ndim == 1 and not counts.all():
        form.hyper.setdefault("attention.recurrent_layers", counts == 0)
    _expert_width(form)


def _lfm2(form: OllamaForm) -> None:
    """Correct the width of the feed-forward layers, which some files state before an adjustment."""
    gate = form.of_a_layer("ffn_gate.weight")
    if gate is not None:
        form.hyper["feed_forward_length"] = _rows(gate)


def _nemotron(form: OllamaForm) -> None:
    latent = form.of_a_layer("ffn_latent_in.weight")
    if latent is not None:
        form.hyper.setdefault("moe_latent_size", _rows(latent))


def _olmo(form: OllamaForm) -> None:
    """Rename YaRN's factor: Ollama writes the whole factor of the logits, llama.cpp the number it is multiplied by."""
    if form.text("rope.scaling.type") == "yarn":
        form.move("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor")


def _llama(form: OllamaForm) -> None:
    """Name the pre-tokenizer, which early files of Llama 3 leave out."""
    tokens = form.others.get("tokenizer.ggml.tokens")
    if form.has_no_pre_tokenizer() and isinstance(tokens, list) and tokens[_EOT : _EOT + 1] == ["<|eot_id|>"]:
        form.others["tokenizer.ggml.pre"] = "llama-bpe"


_EOT = 128009
"""End of a turn in Llama 3's vocabulary."""


def _rows(info: TensorInfo | None) -> int:
    return info.shape[-2] if info is not None and len(info.shape) > 1 else 0


_FIXES: Mapping[str, Callable[[OllamaForm], None]] = {
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "gpt-oss": _gpt_oss,
    "mistral3": _mistral3,
    "glm4moelite": _glm4_moe_lite,
    "deepseek2": _deepseek,
    "qwen3moe": _expert_width,
    "qwen3next": _delta_net,
    "qwen35": _delta_net,
    "qwen35moe": _delta_net,
    "lfm2": _lfm2,
    "nemotron_h_moe": _nemotron,
    "olmo2": _olmo,
    "llama": _llama,
}
"""Further corrections, by Ollama's or llama.cpp's name of the architecture."""
