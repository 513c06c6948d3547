"""What is told of a model, whether it is loaded or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...config import EngineArgs, default_params
from ...loading.find.resolve import resolve
from ...loading.load import generation_config, load_tokenizer, model_type, open_checkpoint
from ...loading.recipes.embedding import read_recipe
from ...loading.summary import Summary, summarize
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
    """A model as its files describe it, as far as clients ask for that."""

    summary: Summary
    """Names, sizes and types."""
    config: dict[str, Any]
    """The checkpoint's config.json, or one made from the metadata of a GGUF file."""
    max_context: int
    """Tokens of the longest sequence: what the plan of a loaded model allows, otherwise what the files and the settings do."""
    vocab_size: int
    """Tokens of the vocabulary; 0 where only the model itself knows."""
    default_params: SamplingParams
    """What a request gets that says nothing about sampling."""
    chat_template: str | None
    """The chat template; None for a model without one."""
    thinks: bool
    """Whether it writes what it thinks before its answers."""
    embeds: bool
    """Whether it turns texts into vectors."""

    @property
    def capabilities(self) -> list[str]:
        """Capabilities of the model, in Ollama's words. Tools are described to a model whose chat template does not know them."""
        if self.embeds:
            return ["embedding"]
        if self.chat_template is None:
            return ["completion"]
        return ["completion", "tools", *(["thinking"] if self.thinks else [])]

    @classmethod
    def of(cls, llm: AsyncLLM) -> ModelCard:
        """That of a loaded model."""
        loaded, template = llm.loaded, llm.tokenizer.chat_template
        thinks = template is not None and llm.output_format.reasoning is not None
        embeds = not isinstance(loaded.embedding, str)
        return cls(loaded.summary, loaded.config, llm.max_context, loaded.model.vocab_size, llm.default_params, template, thinks, embeds)

    @classmethod
    def read(cls, args: EngineArgs) -> ModelCard:
        """That of files of which only the headers and the tokenizer are read, not for the event loop. Raises `MLXInferError`."""
        found = resolve(args.path_or_id)
        checkpoint = open_checkpoint(found.path)
        try:
            context, vocabulary = _sizes(checkpoint)
            summary = summarize(checkpoint, found.name, model_type(checkpoint), context)
            most = min(filter(None, (context, args.max_context)), default=0)
            tokenizer, params = load_tokenizer(checkpoint), default_params(generation_config(checkpoint.path))
            thinks, embeds = _thinks(tokenizer, args), not isinstance(read_recipe(checkpoint), str)
            return cls(summary, checkpoint.config, most, vocabulary, params, tokenizer.chat_template, thinks, embeds)
        finally:
            checkpoint.close()


def _sizes(checkpoint: Checkpoint) -> tuple[int | None, int]:
    """The longest context and the size of the vocabulary, as far as the architecture is known here."""
    if not supports(model_type(checkpoint)):
        return None, 0
    model = build(checkpoint.config, MetaWeights(checkpoint))
    return model.max_context, model.vocab_size


def _thinks(tokenizer: Tokenizer, args: EngineArgs) -> bool:
    if tokenizer.chat_template is None:
        return False
    return output_format(tokenizer, args.tool_format, tokenizer.response_template).reasoning is not None
