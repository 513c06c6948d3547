"""One file per family of architectures. Each function named after a `model_type` turns its config into an `Architecture`."""
