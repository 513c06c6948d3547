"""HTTP on a Unix socket and on loopback TCP: OpenAI's API over `AsyncLLM`s. Imported by the command `serve` only."""
