"""The study of decoding: families with experts, and hybrids of attention and recurrence."""
