"""Source tensors in, safetensors shards and their side files out."""
