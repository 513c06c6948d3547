"""Models whose headers were read: on the graphs of this package, or on mlx-lm's."""
