"""Requests that are looked into, or whose computation is changed: `trace`, `steer`, `patch` and `ablate` of both front doors."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, Union

import mlx.core as mx

from ...loading.load import LoadedModel
from ...util.dataclass import dataclass

if TYPE_CHECKING:
    from ...interpret.interventions import Positions
    from ...interpret.places import Layers
    from ...interpret.recorder import Recorder
    from ...interpret.trace import Trace
    from ...models.decoder import Decoder
    from ...models.hooks import Hooks

_active: ContextVar[tuple[tuple[object, Hooks], ...]] = ContextVar("mlxinfer interventions", default=())
"""The interventions of this thread or task, each with the model that it was made for."""


def active_hooks(model: object) -> Hooks | None:
    """What is done to the requests that this thread or task makes of a model now: one object as long as nothing changes."""
    entries = _active.get()
    return next((hooks for owner, hooks in reversed(entries) if owner is model), None) if entries else None


@contextmanager
def _intervening(model: object, hooks: Hooks) -> Generator[None, None, None]:
    before = active_hooks(model)
    if before is not None:
        from ...interpret.interventions import Chain

        hooks = Chain((before, hooks))
    token = _active.set((*_active.get(), (model, hooks)))
    try:
        yield
    finally:
        _active.reset(token)


class HookedRequests:
    """The interventions, which `LLM` and `AsyncLLM` share. Each is a context manager: it holds for the requests that this thread or task
    makes inside it, in a batch with others too, and leaves the model as it was. Interventions add up. Their requests share no cached
    prefix with others."""

    @property
    def loaded(self) -> LoadedModel:
        raise NotImplementedError

    def _make(self, hooks: Callable[[], Hooks]) -> Hooks:
        """Computes where this front door may."""
        return hooks()

    def steer(self, layer: Layers, vector: Any, scale: float = 1.0, *, positions: Positions = None) -> AbstractContextManager[None]:
        """Add `scale * vector` (`[hidden]`) to the stream that enters a layer, or several: for all tokens, or those at `positions`.

        A direction is usually a difference of traces: `t1["residual"][9][-1] - t2["residual"][9][-1]`. Raises `SettingError`, and
        `UnsupportedModelError` for a model that runs on mlx-lm's graph.
        """
        from ...interpret.interventions import steering

        model = self.loaded.model
        return _intervening(model, self._make(partial(steering, model, layer, vector, scale, positions)))

    def patch(
        self,
        source: Trace,
        what: str = "residual",
        layer: Layers = None,
        *,
        positions: Positions = None,
        heads: Iterable[int] | None = None,
    ) -> AbstractContextManager[None]:
        """Put what was traced for another prompt in place of what is computed: at a layer, several, or all that the trace has.

        `what` is "residual", "attention" (what attention adds to the stream), "mlp" or "heads"; `heads` chooses some of these. `positions`
        are those of the tokens to be changed, by default all that the source has; a mapping `{here: there}` tells which of the source's
        comes where. Raises as `steer` does.
        """
        from ...interpret.interventions import patch

        model = self.loaded.model
        return _intervening(model, self._make(partial(patch, model, source, what, layer, positions, heads)))

    def ablate(
        self,
        what: str = "mlp",
        layer: Layers = None,
        *,
        heads: Iterable[int] | None = None,
        mean: Trace | None = None,
        positions: Positions = None,
    ) -> AbstractContextManager[None]:
        """Put zeros, or the `mean` over a trace's tokens, in place of what is computed; `what`, `layer` and the rest are as in `patch`."""
        from ...interpret.interventions import ablation

        model = self.loaded.model
        return _intervening(model, self._make(partial(ablation, model, what, layer, heads, mean, positions)))


@dataclass(frozen=True, slots=True)
class Tracing:
    """A prompt that is to be read and looked into."""

    model: Decoder
    """The graph that it goes through."""
    wanted: dict[str, tuple[int, ...]]
    """The layers of each place to be kept."""
    recorder: Recorder
    """Keeps them."""
    hooks: Hooks
    """The recorder, after what changes the model at present."""

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

    def result(self, loaded: LoadedModel, token_ids: list[int], logits: mx.array, compute: Callable[[Callable[[], Any]], Any]) -> Trace:
        """What was kept, once the prompt was read; `compute` calls a function where the model may compute."""
        from ...interpret.trace import Trace, read

        decode = loaded.tokenizer.decode
        values = compute(lambda: read(self.recorder, self.model, self.wanted, logits))
        texts = [decode([token]) for token in token_ids]
        return Trace(self.model, token_ids, texts, values, lambda token: decode([token]), compute)
