"""Models of a server: loading, unloading and memory."""
