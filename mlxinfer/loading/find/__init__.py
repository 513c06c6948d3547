"""Resolution of a model's name to a local directory or file."""
