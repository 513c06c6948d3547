"""One model over several machines: each has some of the layers (or a share of every layer), and rank 0 tells the others what to compute."""
