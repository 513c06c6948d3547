"""Hooks of requests: active interventions, and the recorder of a trace."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

import mlx.core as mx
import numpy as np

from ...errors import CheckpointError, SettingError
from ...loading.load import LoadedModel
from ...util.dataclass import dataclass

if TYPE_CHECKING:
    from ...interpret.places import Layers
    from ...interpret.recorder import Recorder
    from ...interpret.trace import Trace
    from ...models.decoder import Decoder
    from ...models.hooks import Hooks
    from ...vision.inputs import PromptImages

_active: ContextVar[tuple[tuple[object, Hooks], ...]] = ContextVar("mlxinfer interventions", default=())
"""(model, hooks) of each active intervention of this thread or task."""


def active_hooks(model: object) -> Hooks | None:
    """The hooks for new requests of this thread or task; the same object until interventions change."""
    entries = _active.get()
    return next((hooks for owner, hooks in reversed(entries) if owner is model), None) if entries else None


@contextmanager
def intervening(model: object, hooks: Hooks) -> Generator[None, None, None]:
    """Apply hooks to the requests that this thread or task makes of a model inside the block."""
    before = active_hooks(model)
    if before is not None:
        from ...interpret.interventions import Chain

        hooks = Chain((before, hooks))
    token = _active.set((*_active.get(), (model, hooks)))
    try:
        yield
    finally:
        _active.reset(token)


@dataclass(frozen=True, slots=True)
class Tracing:
    """The hooks of a trace, for one prompt."""

    model: Decoder
    wanted: dict[str, tuple[int, ...]]
    """Layers to record, by place."""
    recorder: Recorder
    hooks: Hooks
    """The active interventions, then the recorder."""

    @classmethod
    def of(cls, model: Any, what: Union[str, Iterable[str]], layers: Layers, tokens: Sequence[int]) -> Tracing:
        """Raises `SettingError` and `UnsupportedModelError`."""
        from ...interpret.interventions import Chain
        from ...interpret.places import native
        from ...interpret.recorder import Recorder
        from ...interpret.trace import check_size, wanted_places

        graph = native(model)
        wanted = wanted_places(graph, what, layers)
        check_size(graph, wanted, len(tokens))
        recorder, before = Recorder(wanted), active_hooks(model)
        return cls(graph, wanted, recorder, recorder if before is None else Chain((before, recorder)))

    def result(
        self,
        loaded: LoadedModel,
        token_ids: list[int],
        logits: mx.array,
        compute: Callable[[Callable[[], Any]], Any],
        images: PromptImages | None = None,
    ) -> Trace:
        """The trace, once the prompt was computed. `compute` calls a function in a thread that may use the model."""
        from ...interpret.trace import Trace, read
        from ...interpret.trace_file import TracedImage

        decode = loaded.tokenizer.decode
        values = compute(lambda: read(self.recorder, self.model, self.wanted, logits))
        texts = [decode([token]) for token in token_ids]
        traced = []
        for number, image in enumerate(images.images if images else ()):
            traced.append(TracedImage(images.grid(number), image.layout.resized))  # type: ignore[union-attr]
            for (row, column), place in np.ndenumerate(traced[-1].rows):
                texts[int(place)] = f"[image {number + 1} ({row}, {column})]"
        return Trace(self.model, token_ids, texts, values, lambda token: decode([token]), compute, tuple(traced))


def load_trace(path: Path, loaded: LoadedModel, compute: Callable[[Callable[[], Any]], Any]) -> Trace:
    """Read a saved trace of this model. `compute` calls a function in a thread that may use the model.

    Raises `CheckpointError` for a file that is not a trace, and `SettingError` for a trace of another model.
    """
    from ...interpret.places import native
    from ...interpret.trace import Trace
    from ...interpret.trace_file import model_kind, saved_trace
    from ...loading.safetensors import SafetensorsFile

    model, decode = native(loaded.model), loaded.tokenizer.decode
    file = SafetensorsFile(path)
    try:
        saved = saved_trace({name: file.read(name) for name in file.tensors})
    except ValueError as error:
        raise CheckpointError(f"{path} is not a saved trace ({error}): Trace.save writes one") from None
    finally:
        file.close()
    if saved.model != model_kind(model):
        raise SettingError(f"{path} is a trace of another model ({saved.model}), not of {model_kind(model)}")
    return Trace(model, saved.token_ids, saved.tokens, saved.values, lambda token: decode([token]), compute, saved.images)
