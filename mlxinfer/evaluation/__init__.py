"""Loss of a model: its next-token probabilities compared with a teacher's on texts, with standard errors."""
