"""Tokenizers, incremental detokenization, stop strings and chat templates."""

from .detokenizer import Detokenizer
from .stop import StopStrings
from .tokenizer import Tokenizer, from_directory, from_gguf

__all__ = ["Detokenizer", "StopStrings", "Tokenizer", "from_directory", "from_gguf"]
