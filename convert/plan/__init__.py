"""Choice of a format for each matrix before any weight is written."""
