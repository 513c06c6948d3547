"""A decode step by parts, and Metal kernels alone."""
