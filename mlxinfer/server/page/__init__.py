"""A page to chat with the models: static files (docs/page.md)."""

from .files import PATHS, routes

__all__ = ["PATHS", "routes"]
