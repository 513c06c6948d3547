"""What `LLM` and `AsyncLLM` have in common: how they are made, and what they tell of their model."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from inspect import cleandoc, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import mlx.core as mx

from ..cache.kv_format import KVFormat
from ..config import OLDER_NAMES, EngineArgs, keyword_docs, settings, unknown_keyword
from ..errors import DeadlineError, EngineError
from ..loading.memory.plan import MemoryPlan
from ..loading.weights import Progress
from ..tokenizer.tokenizer import Tokenizer
from ..types import Chunk, SamplingParams, TokenLogprob
from .open_model import OpenModel
from .text.hooked_requests import HookedRequests

if TYPE_CHECKING:
    from typing_extensions import ParamSpec, Self

    P = ParamSpec("P")

R = TypeVar("R")

_SETTINGS = frozenset(one.name for one, _ in settings())

FORKED = (
    "a model was loaded before os.fork(), after which MLX cannot compute in the child: "
    'start processes with multiprocessing.get_context("spawn"), or load models only after the fork'
)

_process: int | None = None
"""The process in which a model was loaded first."""


def check_process() -> None:
    """Raise `EngineError` in a child that was forked after MLX had computed: its threads are missing there, and it would wait for ever."""
    global _process
    _process = _process or os.getpid()
    if _process != os.getpid():
        raise EngineError(FORKED)


def known_keywords(init: Callable[P, R]) -> Callable[P, R]:
    """Let `__init__` accept the older names of its keywords, and raise `UnknownKeywordError` for those that it does not have."""
    known = list(signature(init).parameters)[1:]

    @wraps(init)
    def checked(*args: P.args, **given: P.kwargs) -> R:
        if given.keys() <= set(known):
            return init(*args, **given)
        for name in given.keys() - set(known):
            newer = OLDER_NAMES.get(name)
            if newer is None or newer in given:
                raise unknown_keyword(type(args[0]).__name__, name, known)
        renamed: Any = {OLDER_NAMES.get(name, name): value for name, value in given.items()}
        return init(*args, **renamed)

    return checked


class FrontDoor(HookedRequests):
    """A model, described by the properties below."""

    @known_keywords
    def __init__(
        self,
        path_or_id: str | Path,
        dtype: str | mx.Dtype | None = None,
        kv: str = "16",
        *,
        kv_first16: bool = False,
        bits: int | None = None,
        group_size: int = 64,
        gguf_exact: bool = False,
        ignore_config_keys: Sequence[str] = (),
        max_context: int | None = None,
        max_num_seqs: int = 16,
        memory_gb: float | None = None,
        deterministic: bool = False,
        tool_format: str | None = None,
        draft: str | Path | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        adapter_memory_gb: float = 0.0,
        speculate: bool = True,
        prefix_cache: bool = True,
        prefix_disk_gb: float = 0.0,
        prefix_dir: str | Path | None = None,
        prefill_from: str | None = None,
        kv_producer: bool = False,
        max_waiting: int = 1024,
        decode_share: float = 0.8,
        max_step_s: float = 0.1,
        progress: Progress | None = None,
    ) -> None:
        """Load a model.

        Raises `MLXInferError`s: `SettingError` for a value that has no meaning, `UnknownKeywordError` (also a `TypeError`), and what is
        wrong with the checkpoint. docs/settings.md has these keywords as a table:

        """
        given = locals()
        check_process()
        self._start(EngineArgs(**{name: given[name] for name in _SETTINGS}), progress)

    __init__.__doc__ = f"{cleandoc(__init__.__doc__ or '')}\n\n{keyword_docs()}\n    progress: Called with bytes read and bytes in all."

    @classmethod
    def of(cls, args: EngineArgs) -> Self:
        """One with settings that were checked before."""
        return cls(**{one.name: getattr(args, one.name) for one, _ in settings()})

    def _start(self, args: EngineArgs, progress: Progress | None) -> None:
        raise NotImplementedError

    @property
    def _described(self) -> OpenModel:
        """The model, perhaps without its weights. Raises `MLXInferError` if it cannot be described."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    @property
    def name(self) -> str:
        """The alias, hub id or file name that the model was asked for by."""
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
        """The dtype of activations."""
        return self._described.loaded.dtype

    @property
    def kv(self) -> KVFormat:
        """The format of cached keys and values."""
        return self._described.kv

    @property
    def weight_bytes(self) -> int:
        """Bytes that the weights take in memory, without a draft model's."""
        return self._described.loaded.weight_bytes

    @property
    def memory_bytes(self) -> int:
        """Bytes that are planned for weights, cache and a step together."""
        return self._described.reservation.plan.used

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that requests can ask for."""
        return tuple(self._described.adapters.loaded)

    @property
    def max_context(self) -> int:
        """Longest sequence, prompt and answer together, in tokens."""
        return self._described.config.max_context

    @property
    def default_params(self) -> SamplingParams:
        """What a request gets where it leaves out `params` or a field of them: the recommendation of the model's authors, else greedy."""
        return self._described.inputs.default_params

    @property
    def plan(self) -> MemoryPlan:
        """What the memory is used for, in bytes."""
        return self._described.reservation.plan

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines that the user should be told, such as layers that cannot have the cache's format."""
        return self._described.notes


def prompt_logprobs(chunks: list[Chunk], timeout_s: float | None) -> list[TokenLogprob]:
    """What a prompt that was read only has brought. Raises `DeadlineError`, and `EngineError` if it was not read to its end."""
    reason = chunks[-1].finish_reason if chunks else "cancelled"
    if reason == "timeout":
        raise DeadlineError(f"the prompt was not read within {timeout_s:g} s")
    if reason != "stop":
        raise EngineError(f"the prompt was not read to its end: {reason}")
    return [logprob for chunk in chunks for logprob in chunk.prompt_logprobs or ()]
