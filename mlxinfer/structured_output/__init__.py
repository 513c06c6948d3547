"""Answers that fit a schema, an expression or a grammar: which tokens may come next."""
