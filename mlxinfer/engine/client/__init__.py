"""Ways for callers to own a running engine."""
