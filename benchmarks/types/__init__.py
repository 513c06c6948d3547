"""The study of GGUF block types."""
