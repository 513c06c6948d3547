"""The common base of `LLM` and `AsyncLLM`: their keywords, the model's properties, and interventions."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import MISSING, field, fields
from functools import partial, wraps
from inspect import Parameter, Signature, cleandoc
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx

from ..cache.kv_format import KVFormat
from ..config import OLDER_NAMES, EngineArgs, keyword_docs, settings, unknown_keyword
from ..errors import DeadlineError, EngineError
from ..loading.load import LoadedModel
from ..loading.memory.plan import MemoryPlan
from ..loading.weights import Progress
from ..tokenizer.tokenizer import Tokenizer
from ..types import Chunk, SamplingParams, TokenLogprob
from ..util.dataclass import dataclass
from .open_model import OpenModel
from .text.hooks import intervening

if TYPE_CHECKING:
    from typing import Concatenate

    from typing_extensions import ParamSpec, Self

    from ..interpret.interventions import Positions
    from ..interpret.places import Layers
    from ..interpret.trace import Trace
    from ..models.hooks import Hooks
    from ..vision.processor import Layout

    P = ParamSpec("P")
    Init = Callable[[Any, "ModelKeywords"], None]

FORKED = (
    "a model was loaded before os.fork(), after which MLX cannot compute in the child: "
    'start processes with multiprocessing.get_context("spawn"), or load models only after the fork'
)

_process: int | None = None
"""Id of the process that loaded a model first."""


def check_process() -> None:
    """Raise `EngineError` in a child that was forked after MLX had computed. It has no MLX threads and would wait for ever."""
    global _process
    _process = _process or os.getpid()
    if _process != os.getpid():
        raise EngineError(FORKED)


@dataclass(frozen=True, slots=True)
class ModelKeywords(EngineArgs):
    """The arguments of `LLM` and `AsyncLLM`: those of `EngineArgs`, and `progress`."""

    progress: Progress | None = field(default=None, kw_only=True)


def _with_keywords_of(arguments: Callable[P, ModelKeywords]) -> Callable[[Init], Callable[Concatenate[Any, P], None]]:
    """Give an `__init__` the arguments of a class, of which it gets an object. Older names of keywords are accepted, and
    `UnknownKeywordError` is raised for unknown ones."""
    of_class = fields(ModelKeywords)
    known = [one.name for one in of_class]
    parameters = [Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)]
    for one in of_class:
        kind = Parameter.KEYWORD_ONLY if one.kw_only else Parameter.POSITIONAL_OR_KEYWORD
        default = Parameter.empty if one.default is MISSING else one.default
        parameters.append(Parameter(one.name, kind, default=default, annotation=one.type))

    def decorate(init: Init) -> Callable[Concatenate[Any, P], None]:
        @wraps(init)
        def checked(self: Any, *args: P.args, **given: P.kwargs) -> None:
            for name in given.keys() - set(known):
                newer = OLDER_NAMES.get(name)
                if newer is None or newer in given:
                    raise unknown_keyword(type(self).__name__, name, known)
            renamed: Any = {OLDER_NAMES.get(name, name): value for name, value in given.items()}
            init(self, arguments(*args, **renamed))

        checked.__signature__ = Signature(parameters, return_annotation=None)  # type: ignore[attr-defined]
        return cast("Callable[Concatenate[Any, P], None]", checked)

    return decorate


class ModelBase:
    """A model, described by the properties below."""

    @_with_keywords_of(ModelKeywords)
    def __init__(self, keywords: ModelKeywords) -> None:
        """Load a model.

        Raises `MLXInferError`s: `SettingError` for a wrong value, `UnknownKeywordError` (also a `TypeError`), and errors of the checkpoint.
        docs/settings.md has these keywords as a table:

        """
        check_process()
        self._start(EngineArgs(**{one.name: getattr(keywords, one.name) for one, _ in settings()}), keywords.progress)

    __init__.__doc__ = f"{cleandoc(__init__.__doc__ or '')}\n\n{keyword_docs()}\n    progress: Called with bytes read and bytes in all."

    @classmethod
    def of(cls, args: EngineArgs) -> Self:
        """Create one from settings that were checked before."""
        return cls(**{one.name: getattr(args, one.name) for one, _ in settings()})

    def _start(self, args: EngineArgs, progress: Progress | None) -> None:
        raise NotImplementedError

    @property
    def loaded(self) -> LoadedModel:
        """The loaded model, with its summary and files."""
        raise NotImplementedError

    def _make(self, hooks: Callable[[], Hooks]) -> Hooks:
        """Call a function in a thread that may use the model."""
        return hooks()

    @property
    def _described(self) -> OpenModel:
        """The model, perhaps without its weights. Raises `MLXInferError` if it cannot be described."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    @property
    def name(self) -> str:
        """The alias, hub id or file name given to load the model."""
        return self._described.loaded.name

    @property
    def tokenizer(self) -> Tokenizer:
        """Text to token ids and back: `encode`, `decode`, `encode_chat`, `render_chat`, `chat_template`, `eos_token_ids`."""
        return self._described.loaded.tokenizer

    @property
    def config(self) -> dict[str, Any]:
        """The checkpoint's config.json, or one made from the metadata of a GGUF file."""
        return self._described.loaded.config

    @property
    def dtype(self) -> mx.Dtype:
        """Dtype of activations."""
        return self._described.loaded.dtype

    @property
    def kv(self) -> KVFormat:
        """Format of cached keys and values."""
        return self._described.kv

    @property
    def weight_bytes(self) -> int:
        """Bytes that the weights take in memory, without a draft model's."""
        return self._described.loaded.weight_bytes

    @property
    def memory_bytes(self) -> int:
        """Bytes planned for weights, cache and a step together."""
        return self._described.reservation.plan.used

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that requests can use."""
        return tuple(self._described.adapters.loaded)

    @property
    def sees_images(self) -> bool:
        """True if prompts can have images."""
        return not isinstance(self._described.inputs.vision, str)

    def image_layout(self, image: Any) -> Layout:
        """The tokens of an image in a prompt of this model, and the size that the model sees, without decoding a file.

        `image` is a path, bytes, a PIL image or a uint8 array [height, width, 3]. Raises `ImageError`, also for a model that cannot see.
        """
        return self._described.inputs.image_layout(image)

    @property
    def max_context(self) -> int:
        """Maximum length of prompt and answer together, in tokens."""
        return self._described.config.max_context

    @property
    def default_params(self) -> SamplingParams:
        """Parameters of requests that leave them out: recommended by the model's authors, otherwise greedy."""
        return self._described.inputs.default_params

    @property
    def plan(self) -> MemoryPlan:
        """The use of the memory, in bytes."""
        return self._described.reservation.plan

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines to show to the user, such as layers that do not support the cache's format."""
        return self._described.notes

    def steer(self, layer: Layers, vector: Any, scale: float = 1.0, *, positions: Positions = None) -> AbstractContextManager[None]:
        """Add `scale * vector` (`[hidden]`) to the stream that enters a layer, or several: for all tokens, or those at `positions`.

        The block's requests are changed, those of this thread or task only, and share no cached prefix with others. Interventions add up.

        A direction is usually a difference of traces: `t1["residual"][9][-1] - t2["residual"][9][-1]`. Raises `SettingError`, and
        `UnsupportedModelError` for a model that runs on mlx-lm's graph.
        """
        from ..interpret.interventions import steering

        model = self.loaded.model
        return intervening(model, self._make(partial(steering, model, layer, vector, scale, positions)))

    def patch(
        self,
        source: Trace,
        what: str = "residual",
        layer: Layers = None,
        *,
        positions: Positions = None,
        heads: Iterable[int] | None = None,
    ) -> AbstractContextManager[None]:
        """Replace computed values by those traced for another prompt: at one layer, several, or all that the trace has.

        `what` is "residual", "attention" (what attention adds to the stream), "mlp" or "heads"; `heads` chooses some of these. `positions`
        are those of the tokens to change, by default all that the source has. A mapping `{here: there}` gives the source's position for
        each. Raises as `steer` does.
        """
        from ..interpret.interventions import patch

        model = self.loaded.model
        return intervening(model, self._make(partial(patch, model, source, what, layer, positions, heads)))

    def ablate(
        self,
        what: str = "mlp",
        layer: Layers = None,
        *,
        heads: Iterable[int] | None = None,
        mean: Trace | None = None,
        positions: Positions = None,
    ) -> AbstractContextManager[None]:
        """Replace computed values by zeros, or by the `mean` over a trace's tokens. The other arguments are those of `patch`."""
        from ..interpret.interventions import ablation

        model = self.loaded.model
        return intervening(model, self._make(partial(ablation, model, what, layer, heads, mean, positions)))


def prompt_logprobs(chunks: list[Chunk], timeout_s: float | None) -> list[TokenLogprob]:
    """Log-probabilities of a scored prompt. Raises `DeadlineError`, and `EngineError` if the prompt was not computed to its end."""
    reason = chunks[-1].finish_reason if chunks else "cancelled"
    if reason == "timeout":
        raise DeadlineError(f"the prompt was not read within {timeout_s:g} s")
    if reason != "stop":
        raise EngineError(f"the prompt was not read to its end: {reason}")
    return [logprob for chunk in chunks for logprob in chunk.prompt_logprobs or ()]
