"""One file per family of architectures. Each function that is named after a `model_type` makes an `Architecture` of its config."""
