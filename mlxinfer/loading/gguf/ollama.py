"""GGUF files in the form of Ollama's converters, brought into the form of llama.cpp's, which the rest of this folder reads.

Sources: `convert/` of https://github.com/ollama/ollama in all its versions says what was written. Its graphs (`model/models/`, until
May 2026) say what that means, and what a missing key stands for. `llama/compat/` lists the files that were published.
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
"""Names that Ollama writes for models that cannot be read, with the reason."""


def from_ollama(files: GGUFFiles) -> bool:
    """Bring the metadata and the names of the tensors into llama.cpp's form, where they are in Ollama's. True for a model that
    sees or hears; what it does so with is left out.

    Raises `UnsupportedModelError` for what Ollama wrote and nothing here computes. A file that is in llama.cpp's form stays as it is.
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
    """Ollama left out what its graph knew of the published sizes: of 4B, 12B and 27B that their rope is stretched, of 1B that its logits
    have no cap."""
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
"""The chat format of Google's model card, which the checkpoint keeps in a file that Ollama's converter did not read."""
_GEMMA3_1B = 26
_GEMMA3_STRETCHED = (34, 48, 62)
"""Layers of the published models."""


def _gemma4(form: OllamaForm) -> None:
    """Its tokenizer is called a SentencePiece model, and has merges."""
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
    """The scale of single channels is 1 in llama.cpp's form."""
    if "rope.scaling.mscale" not in form.hyper:
        return
    if form.number("rope.scaling.mscale") != 1 or not form.number("rope.scaling.yarn_log_multiplier"):
        raise form.unsupported("rope.scaling.mscale", f"= {shown(form.hyper['rope.scaling.mscale'])}")
    form.drop("rope.scaling.mscale")


def _glm4_moe_lite(form: OllamaForm) -> None:
    """Ollama's keys without `_mla` are llama.cpp's with it."""
    form.drop("attention.key_length_mla", "attention.value_length_mla")


def _deepseek(form: OllamaForm) -> None:
    if form.number("attention.q_lora_rank", 1) == 0:
        form.drop("attention.q_lora_rank")


def _expert_width(form: OllamaForm) -> None:
    gate = form.of_a_layer("ffn_gate_exps.weight")
    if gate is not None:
        form.hyper.setdefault("expert_feed_forward_length", _rows(gate))


def _delta_net(form: OllamaForm) -> None:
    """Value heads are in llama.cpp's order in Qwen 3.5's files, and in that of the checkpoint in Qwen3-Next's."""
    expected = form.architecture != "qwen3next"
    order = form.hyper.pop("ssm.v_head_reordered", expected)
    if order is not expected:
        raise form.unsupported("ssm.v_head_reordered", f"= {shown(order)}")
    counts = form.hyper.get("attention.head_count_kv")
    if isinstance(counts, np.ndarray) and counts.ndim == 1 and not counts.all():
        form.hyper.setdefault("attention.recurrent_layers", counts == 0)
    _expert_width(form)


def _lfm2(form: OllamaForm) -> None:
    """Some files state the width of the feed-forward layers as it was before an adjustment."""
    gate = form.of_a_layer("ffn_gate.weight")
    if gate is not None:
        form.hyper["feed_forward_length"] = _rows(gate)


def _nemotron(form: OllamaForm) -> None:
    latent = form.of_a_layer("ffn_latent_in.weight")
    if latent is not None:
        form.hyper.setdefault("moe_latent_size", _rows(latent))


def _olmo(form: OllamaForm) -> None:
    """Ollama writes the whole factor of YaRN's logits where llama.cpp writes what it is multiplied with."""
    if form.text("rope.scaling.type") == "yarn":
        form.move("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor")


def _llama(form: OllamaForm) -> None:
    """Early files of Llama 3 name no pre-tokenizer."""
    tokens = form.others.get("tokenizer.ggml.tokens")
    if form.has_no_pre_tokenizer() and isinstance(tokens, list) and tokens[_EOT : _EOT + 1] == ["<|eot_id|>"]:
        form.others["tokenizer.ggml.pre"] = "llama-bpe"


_EOT = 128009
"""The end of a turn in Llama 3's vocabulary."""


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
"""Further mends, by Ollama's name of the architecture or llama.cpp's."""
