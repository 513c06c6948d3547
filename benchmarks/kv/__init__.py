"""What a quantized cache costs: next-token probabilities compared with those of the same engine with a 16-bit cache, on real text."""
