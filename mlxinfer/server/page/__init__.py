"""A page to talk to the models: static files, served as they are (docs/page.md)."""

from .browser import open_page
from .files import PATHS, routes

__all__ = ["PATHS", "open_page", "routes"]
