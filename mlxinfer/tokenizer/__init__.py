"""Tokenizers, incremental detokenization, stop strings and chat templates."""

from .detokenizer import Detokenizer, StopStrings
from .tokenizer import Tokenizer, from_directory, from_gguf

__all__ = ["Detokenizer", "StopStrings", "Tokenizer", "from_directory", "from_gguf"]
