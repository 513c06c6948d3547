"""Facts about a model, loaded or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ...config import EngineArgs, default_params
from ...errors import MLXInferError
from ...loading.find.resolve import resolve
from ...loading.load import generation_config, load_tokenizer, model_type, open_checkpoint
from ...loading.recipes.embedding import read_recipe
from ...loading.summary import Summary, summarize
from ...loading.vision import prepare_vision
from ...loading.weights import MetaWeights
from ...models import build, supports
from ...output_format.detect import output_format
from ...tokenizer.tokenizer import Tokenizer
from ...types import SamplingParams

if TYPE_CHECKING:
    from ...engine.async_llm import AsyncLLM
    from ...loading.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class ModelCard:
    """Facts from a model's files that clients ask for."""

    summary: Summary
    config: dict[str, Any]
    """The checkpoint's config.json, or a config made from the metadata of a GGUF file."""
    max_context: int
    """Maximum tokens of a sequence: the plan's limit for a loaded model, otherwise the limit of the files and settings."""
    vocab_size: int
    """Tokens of the vocabulary; 0 if unknown before the model is loaded."""
    default_params: SamplingParams
    """Sampling parameters for requests that set none."""
    chat_template: str | None
    thinks: bool
    """True if the model writes reasoning before its answers."""
    embeds: bool
    sees: bool = False
    """True if the model sees images."""

    @property
    def capabilities(self) -> list[str]:
        """Capabilities in Ollama's words. Every chat model has "tools": tools are described in the prompt if the chat template does not
        support them."""
        if self.embeds:
            return ["embedding"]
        if self.chat_template is None:
            return ["completion"]
        return ["completion", "tools", *(["thinking"] if self.thinks else []), *(["vision"] if self.sees else [])]

    @property
    def input_modalities(self) -> list[str]:
        """Kinds of input in the words of OpenRouter and llama.cpp."""
        return ["text", "image"] if self.sees else ["text"]

    @classmethod
    def of(cls, llm: AsyncLLM) -> ModelCard:
        """The facts about a loaded model."""
        loaded, template = llm.loaded, llm.tokenizer.chat_template
        thinks = template is not None and llm.output_format.reasoning is not None
        embeds = not isinstance(loaded.embedding, str)
        sees = not isinstance(loaded.vision, str)
        vocabulary, params = loaded.model.vocab_size, llm.default_params
        return cls(loaded.summary, loaded.config, llm.max_context, vocabulary, params, template, thinks, embeds, sees)

    @classmethod
    def read(cls, args: EngineArgs) -> ModelCard:
        """The facts about a model from its headers and its tokenizer. Reads files: do not call on the event loop. Raises
        `MLXInferError`."""
        found = resolve(args.path_or_id)
        checkpoint = open_checkpoint(found.path)
        try:
            context, vocabulary, sees = _of_headers(checkpoint, args)
            summary = summarize(checkpoint, found.name, model_type(checkpoint), context)
            most = min(filter(None, (context, args.max_context)), default=0)
            tokenizer, params = load_tokenizer(checkpoint), default_params(generation_config(checkpoint.path))
            thinks, embeds = _thinks(tokenizer, args), not isinstance(read_recipe(checkpoint), str)
            return cls(summary, checkpoint.config, most, vocabulary, params, tokenizer.chat_template, thinks, embeds, sees)
        finally:
            checkpoint.close()


def _of_headers(checkpoint: Checkpoint, args: EngineArgs) -> tuple[int | None, int, bool]:
    """The maximum context, the vocabulary size, and True if the model sees images; None, 0 and False for an unknown architecture."""
    if not supports(model_type(checkpoint)):
        return None, 0, False
    weights = MetaWeights(checkpoint)
    model = build(checkpoint.config, weights)
    return model.max_context, model.vocab_size, _sees(checkpoint, weights, args)


def _sees(checkpoint: Checkpoint, weights: MetaWeights, args: EngineArgs) -> bool:
    try:
        weights.finish()
        found = prepare_vision(checkpoint, weights.index, mx.float32, args.vision, args.mmproj)
    except MLXInferError:  # loading reports it
        return False
    if isinstance(found, str):
        return False
    found.close()
    return True


def _thinks(tokenizer: Tokenizer, args: EngineArgs) -> bool:
    if tokenizer.chat_template is None:
        return False
    return output_format(tokenizer, args.tool_format, tokenizer.response_template).reasoning is not None
