"""Tokenizers, incremental detokenization and chat templates."""

from .detokenizer import Detokenizer
from .tokenizer import Tokenizer, from_directory, from_gguf

__all__ = ["Detokenizer", "Tokenizer", "from_directory", "from_gguf"]
