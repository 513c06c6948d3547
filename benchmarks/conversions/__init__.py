"""What conversions to few bits lose, ours and others': KL divergence from the model they were made of, over bits per weight written."""
