"""What a model loses: probabilities of the next token compared with a teacher's, on texts, with standard errors."""
