"""Names with a tag, as Ollama's have one: what is served is the latest."""

from __future__ import annotations

from ..models import Registry, Served
from ..problems import Problem

_LATEST = ":latest"


def find(models: Registry, name: str) -> Served:
    """Raises `Problem` with the words that Ollama's clients know."""
    for candidate in dict.fromkeys((name, name.removesuffix(_LATEST))):
        try:
            return models.get(candidate)
        except Problem:
            continue
    raise Problem(404, "not_found", f"model {name[:200]!r} not found", param="model", code="model_not_found")


def tagged(served: Served) -> str:
    """Clients that look for a name in a list add the tag where there is none."""
    return served.name if ":" in served.name else served.name + _LATEST
