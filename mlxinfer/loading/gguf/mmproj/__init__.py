"""Towers in `mmproj` files, beside the GGUF file of a text model."""
