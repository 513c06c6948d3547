"""This project compared with mlx-lm and llama.cpp on one machine, in one run. See README.md."""
