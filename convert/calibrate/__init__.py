"""Statistics of the inputs of each matrix, read block by block."""
