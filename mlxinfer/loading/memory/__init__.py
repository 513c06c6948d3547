"""Memory planning before a model is loaded."""
