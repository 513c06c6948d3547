"""One file per family of architectures; each has a `build` that reads the config and asks for the tensors."""
