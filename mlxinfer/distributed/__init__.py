"""One model on several machines: each rank has some layers (or a share of every layer), and rank 0 schedules the steps of all."""
