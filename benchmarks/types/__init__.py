"""The study of block types."""
