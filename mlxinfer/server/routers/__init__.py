"""Protocols of outside routers: vLLM's endpoints, KV events, KV transfer."""
