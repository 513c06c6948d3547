"""Reading a Hugging Face config so that nothing in it is overlooked.

Every key that a model understands is taken; a key that is left, and is not known to leave the maths alone, is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import UnsupportedModelError
from ..typed_reader import TypedReader, shown

_MANY = 1 << 16

_HARMLESS_KEYS = """
add_cross_attention architectures attn_implementation auto_map bad_words_ids begin_suppress_tokens cache_implementation
chunk_size_feed_forward cross_attention_hidden_size diversity_penalty do_sample dtype early_stopping
encoder_no_repeat_ngram_size experts_implementation exponential_decay_length_penalty finetuning_task
gradient_checkpointing id2label is_decoder is_encoder_decoder
is_llama_config label2id length_penalty max_length max_new_tokens max_sequence_length min_length mlx_version
model_max_length model_type name_or_path no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences output_attentions
output_hidden_states output_past output_router_logits output_scores prefix pretraining_tp problem_type pruned_heads
quantization quantization_config remove_invalid_values repetition_penalty return_dict return_dict_in_generate
router_jitter_noise seq_length suppress_tokens task_specific_params temperature tf_legacy_loss
tie_encoder_decoder tokenizer_class tokenizer_model_max_length top_k top_p torch_dtype torchscript transformers.js_config
transformers_version typical_p use_bfloat16 use_cache use_return_dict
"""
_HARMLESS = frozenset(_HARMLESS_KEYS.split())

_HARMLESS_STARTS = ("_", "initializer_", "unsloth_")
_HARMLESS_ENDS = ("_token_id", "_token_ids", "_dropout", "_pdrop", "_loss_coef")
"""Bookkeeping of transformers and others, ids of tokens, and what matters in training alone."""

_MEANINGFUL = frozenset({"_sliding_window_pattern"})

_FALSE_KEYS = """
attention_bias lm_head_bias mlp_bias rope_interleaved rope_traditional use_bidirectional_attention use_mrope use_sliding_window
"""
_HARMLESS_WHEN_FALSE = frozenset(_FALSE_KEYS.split())


class ConfigReader(TypedReader):
    """Takes typed values out of a config. Every error is an `UnsupportedModelError` that names the key."""

    def error(self, key: str, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"config.json: {key} {what}")

    def skip(self, *keys: str) -> None:
        """Keys that this architecture is known not to read."""
        self._taken.update(keys)

    def only(self, key: str, *allowed: Any) -> None:
        """Accept a key only with these values: those under which it changes nothing."""
        value = self.take(key)
        if value is not None and value not in allowed:
            raise self.bad(key, value, " or ".join(repr(item) for item in allowed))

    def count(self, key: str, default: int, *, low: int = 1) -> int:
        """A number of things that are made one by one, so that no config can ask for more than there is memory for."""
        value = self.integer(key, default, low=low)
        if value > _MANY:
            raise self.bad(key, value, f"at most {_MANY}")
        return value

    def nonzero(self, key: str, default: float) -> float:
        value = self.number(key, default)
        if value == 0:
            raise self.bad(key, value, "a number other than 0")
        return value

    def integers(self, key: str, count: int = 0) -> list[int] | None:
        """A list of at least `count` whole numbers, or None where the key is missing or null."""
        value = self.take(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < count or not all(isinstance(item, int) for item in value):
            raise self.bad(key, value, f"a list of {count} whole numbers" if count else "a list of whole numbers")
        return value

    def names(self, key: str, known: Sequence[str], count: int) -> list[str] | None:
        """One of the known names for each of `count` layers, or None where the key is missing or null."""
        value = self.take(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < count:
            raise self.bad(key, value, f"a list of {count} names")
        for name in value[:count]:
            if name not in known:
                raise self.bad(key, name, f"one of {', '.join(known)}")
        return value[:count]

    def uniform_layers(self, kind: str) -> None:
        """Accept `layer_types` only where it says of every layer what holds for this architecture anyway."""
        value = self.take("layer_types")
        if value is not None and (not isinstance(value, list) or any(name != kind for name in value)):
            raise self.bad("layer_types", value, f"{kind} for every layer of this model")

    def finish(self) -> None:
        """Raise for the first key that was not taken and may change the maths."""
        for key, value in self.untaken():
            if value is not None and not _is_harmless(key, value):
                raise self.error(key, f"= {shown(value)} is not understood by this model ({self.values.get('model_type')})")


def _is_harmless(key: str, value: object) -> bool:
    if key in _HARMLESS or (key in _HARMLESS_WHEN_FALSE and value is False):
        return True
    return (key.startswith(_HARMLESS_STARTS) and key not in _MEANINGFUL) or key.endswith(_HARMLESS_ENDS)
