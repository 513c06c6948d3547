"""Ollama's names of architectures, keys and tensors, and a file on its way to llama.cpp's names. Sources as in `ollama.py`."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from ...errors import UnsupportedModelError
from ...util.typed_reader import is_number, shown
from .files import GGUFFiles
from .reader import TensorInfo

ALTERNATING = "ffn_gate_up_exps_alternating"
"""Name for gpt-oss's matrices with alternating rows of the gate and of the other half; llama.cpp has no such form."""

_TEXT_MODELS = {
    "gptoss": "gpt-oss",
    "olmo3": "olmo2",
    "glm4moelite": "deepseek2",
    "qwen25vl": "qwen2",
    "qwen2vl": "qwen2",
    "qwen3vl": "qwen3",
    "qwen3vlmoe": "qwen3moe",
    "nemotron_h_omni": "nemotron_h",
}
"""Architectures whose text model has another name in llama.cpp; `qwen2vl`, `qwen3vl` and `qwen3vlmoe` are llama.cpp's own names, whose
text models differ from the others only by the sections of the rope."""

_SEEING = frozenset({"qwen25vl", "qwen2vl", "qwen3vl", "qwen3vlmoe", "nemotron_h_omni"})
"""Architectures of images; llama.cpp stores their vision towers in separate files."""

_OTHER_SENSES = re.compile(r"(v|a|mm|model\.vision_tower|model\.audio_tower)\..+")
_DRAFTS = re.compile(r"mtp\..+")

_MOVED = {
    "rope.local.freq_base": "rope.freq_base_swa",
    "rope.global.freq_base": "rope.freq_base",
    "rope.scaling.beta_fast": "rope.scaling.yarn_beta_fast",
    "rope.scaling.beta_slow": "rope.scaling.yarn_beta_slow",
    "rope.scaling.extrapolation_factor": "rope.scaling.yarn_ext_factor",
    "rope.scaling.mscale_all_dim": "rope.scaling.yarn_log_multiplier",
    "rope.scaling_beta": "attention.temperature_scale",
    "norm_top_k_prob": "expert_weights_norm",
}
"""Ollama's names of keys, to llama.cpp's."""
_MARKS = {*_MOVED, "mm.tokens_per_image", "vision.block_count", "ssm.v_head_reordered"}
"""Keys that only Ollama's converter writes."""
_SECTIONS = ("rope.dimension_sections", "rope.mrope_section", "mrope_sections")
"""Names of the numbers of pairs that turn by time, row and column; the first is llama.cpp's."""
_PRE_TOKENIZERS = {
    "gpt-oss": "gpt-4o",
    "olmo2": "dbrx",
    "mistral3": "tekken",
    "qwen2": "qwen2",
    "qwen3": "qwen2",
    "qwen3moe": "qwen2",
    "qwen3next": "qwen2",
    "qwen35": "qwen35",
    "qwen35moe": "qwen35",
    "lfm2": "lfm2",
    "lfm2moe": "lfm2",
    "glm4moelite": "glm4",
}
"""Pre-tokenizers of Ollama's graphs, for files that name none or the default."""
RENAMED: Mapping[str, Mapping[str, str]] = {
    "gptoss": {".ffn_gate_up_exps.": f".{ALTERNATING}."},
    "gpt-oss": {
        ".attn_out.": ".attn_output.",
        ".attn_sinks": ".attn_sinks.weight",
        ".ffn_norm.": ".post_attention_norm.",
    },
    "gemma4": {
        ".attn_post_norm.": ".post_attention_norm.",
        ".ffn_pre_norm.": ".ffn_norm.",
        ".ffn_post_norm.": ".post_ffw_norm.",
        ".ffn_pre_norm_2.": ".pre_ffw_norm_2.",
        ".ffn_post_norm_1.": ".post_ffw_norm_1.",
        ".ffn_post_norm_2.": ".post_ffw_norm_2.",
        ".layer_scalar": ".layer_output_scale.weight",
        ".ffn_gate_inp.per_expert_scale": ".ffn_down_exps.scale",
    },
    "qwen3next": {".ssm_dt": ".ssm_dt.bias"},
    "qwen35": {".ssm_dt": ".ssm_dt.bias"},
    "qwen35moe": {".ssm_dt": ".ssm_dt.bias"},
    "nemotron_h_moe": {".ffn_latent_in.": ".ffn_latent_down.", ".ffn_latent_out.": ".ffn_latent_up."},
    "deepseek2": {".attn_out.": ".attn_output.", ".exp_probs_b": ".exp_probs_b.bias"},
    "lfm2": {".attn_out.": ".attn_output."},
    "lfm2moe": {".attn_out.": ".attn_output.", ".exp_probs_b": ".exp_probs_b.bias"},
}
"""By Ollama's or llama.cpp's name of the architecture: parts of tensor names (their ends, if no dot follows), to llama.cpp's."""


class OllamaForm:
    """A file on its way from Ollama's form to llama.cpp's."""

    def __init__(self, files: GGUFFiles, name: str) -> None:
        self.files, self.written_as, self.architecture = files, name, name
        prefix = f"{name}."
        self.hyper = {key.removeprefix(prefix): value for key, value in files.metadata.items() if key.startswith(prefix)}
        self.others = {key: value for key, value in files.metadata.items() if not key.startswith(prefix)}
        self.tensors = {tensor: tensor for tensor in files.tensors if not _OTHER_SENSES.fullmatch(tensor) and not _DRAFTS.fullmatch(tensor)}
        """Tensors of the text model: new name to name in the file."""
        self.by_ollama = name in _TEXT_MODELS or not self.hyper.keys().isdisjoint(_MARKS)
        """True if Ollama's converter seems to have written the file."""
        parts = any(map(_OTHER_SENSES.fullmatch, files.tensors)) or any(key.startswith(("vision.", "audio.")) for key in self.hyper)
        self.senses = parts or name in _SEEING
        """True if the model takes images or sound."""

    def unsupported(self, key: str, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self.files.path}: made by Ollama, with {self.written_as}.{key} {what}, which is not supported; "
            f"give the model's safetensors instead"
        )

    def info(self, tensor: str) -> TensorInfo | None:
        return self.files.tensors.get(self.tensors.get(tensor, ""))

    def of_a_layer(self, end: str) -> TensorInfo | None:
        """The tensor of this name in the first layer that has one."""
        found = next((old for new, old in self.tensors.items() if new.startswith("blk.") and new.split(".", 2)[-1] == end), None)
        return None if found is None else self.files.tensors[found]

    def number(self, key: str, default: float = 0.0) -> float:
        """The value of a key, or the default if it is not a number, which the reader of the keys refuses later."""
        value = self.hyper.get(key, default)
        return float(value) if is_number(value) else default

    def text(self, key: str, default: str = "") -> str:
        """As `number`, for text."""
        value = self.hyper.get(key, default)
        return value if isinstance(value, str) else default

    def has_no_pre_tokenizer(self) -> bool:
        """True if the tokenizer splits words by rules that the file does not name."""
        pre = self.others.get("tokenizer.ggml.pre", "default")
        return self.others.get("tokenizer.ggml.model") == "gpt2" and isinstance(pre, str) and pre in ("", "default")

    def drop(self, *keys: str) -> None:
        for key in keys:
            self.hyper.pop(key, None)

    def move(self, old: str, new: str) -> None:
        """Rename a key. Raises `UnsupportedModelError` if the file has both names with different values."""
        if old not in self.hyper:
            return
        value = self.hyper.pop(old)
        if new in self.hyper and not np.array_equal(self.hyper[new], value):
            raise self.unsupported(old, f"= {shown(value)} beside another {new}")
        self.hyper[new] = value

    def name_the_architecture(self) -> None:
        self.architecture = _TEXT_MODELS.get(self.written_as, self.written_as)
        if self.written_as == "nemotron_h_omni" and self.number("expert_count") > 0:
            self.architecture = "nemotron_h_moe"
        if self.written_as == "qwen35moe" and self.of_a_layer("ssm_ba.weight"):
            self.architecture = "qwen3next"  # Ollama's newer converter has one name for both.

    def move_keys(self) -> None:
        for old, new in _MOVED.items():
            self.move(old, new)
        if self.architecture.startswith("qwen"):
            sections = next((self.hyper[key] for key in _SECTIONS if key in self.hyper), None)
            self.drop(*_SECTIONS, "mrope_interleaved", "rope.mrope_interleaved")
            if sections is not None:
                self.hyper[_SECTIONS[0]] = sections
        if self.text("rope.scaling.type", "none") in ("", "default"):
            self.drop("rope.scaling.type", *(["rope.scaling.factor"] if self.text("rope.scaling.type") else []))
        if self.number("rope.scaling.factor", 1.0) == 0:
            self.drop("rope.scaling.factor")
        if self.number("rope.scaling.original_context_length", 1) == 0:
            self.drop("rope.scaling.original_context_length")
        self._check_head_dim()

    def _check_head_dim(self) -> None:
        """Correct the channels of a head: Ollama's Llama files state them, but derive the rotated channels from the embedding."""
        heads, hidden = self.number("attention.head_count"), self.number("embedding_length")
        usual = hidden // heads if heads else 0
        if "attention.head_dim" not in self.hyper:
            return
        self.hyper.setdefault("attention.key_length", self.hyper["attention.head_dim"])
        self.hyper.setdefault("attention.value_length", self.hyper["attention.head_dim"])
        if self.number("rope.dimension_count") == usual:
            self.drop("rope.dimension_count")

    def rename_tensors(self, names: Mapping[str, str]) -> None:
        """Rename tensors to llama.cpp's names. A tensor whose new name is taken keeps its own, for the loader to refuse."""
        for old, new in names.items():
            for tensor in list(self.tensors):
                if old.endswith("."):
                    target = tensor.replace(old, new)
                else:
                    target = tensor.removesuffix(old) + new if tensor.endswith(old) else tensor
                if target not in self.tensors:
                    self.tensors[target] = self.tensors.pop(tensor)

    def mend_tokenizer(self) -> None:
        """Name the pre-tokenizer, and remove tokens of images, which have no row in the embedding."""
        pre = _PRE_TOKENIZERS.get(self.written_as) or _PRE_TOKENIZERS.get(self.architecture)
        if pre and self.has_no_pre_tokenizer():
            self.others["tokenizer.ggml.pre"] = pre
        embedding = self.info("token_embd.weight")
        rows = embedding.shape[0] if embedding is not None and len(embedding.shape) == 2 else 0
        for key in ("tokens", "scores", "token_type"):
            values = self.others.get(f"tokenizer.ggml.{key}")
            if rows and isinstance(values, (list, np.ndarray)) and len(values) > rows:
                self.others[f"tokenizer.ggml.{key}"] = values[:rows]

    def settle(self) -> None:
        self.files.hold(
            {"general.architecture": self.architecture}
            | {key: value for key, value in self.others.items() if key != "general.architecture"}
            | {f"{self.architecture}.{key}": value for key, value in self.hyper.items()},
            self.tensors,
        )
