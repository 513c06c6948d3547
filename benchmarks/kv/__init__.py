"""What a quantized cache costs: the next token's probabilities beside those of the same engine with a 16-bit cache, on real text."""
