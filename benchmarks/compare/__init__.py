"""This project, llama.cpp and mlx-lm, compared in one run."""
