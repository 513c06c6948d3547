"""The loss of quantized caches."""
