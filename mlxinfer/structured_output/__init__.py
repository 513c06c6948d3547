"""Constrained decoding: masks of the tokens that keep an answer within a schema, an expression or a grammar."""
