"""The prompt of a causal language model that reranks, and its tokens for yes and no.

Qwen3-Reranker's prompt is that of its page (https://huggingface.co/Qwen/Qwen3-Reranker-0.6B). Its first checkpoints are recognised by
name only; later ones have a `LogitScore` of sentence-transformers in modules.json.
"""

from __future__ import annotations

from pathlib import Path

from ...tokenizer.tokenizer import Tokenizer
from ...util.dataclass import dataclass
from ..checkpoint import Checkpoint
from ..files import read_json_if_there
from .embedding import modules_in

_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_BEFORE = f"<|im_start|>system\n{_SYSTEM}<|im_end|>\n<|im_start|>user\n"
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@dataclass(frozen=True, slots=True)
class RerankRecipe:
    """The prompt of a pair. Its relevance is the probability of `yes` against `no` after `after`."""

    yes: int
    no: int | None
    """Token id; None if the logit of `yes` alone counts."""
    before: str = _BEFORE
    """Start of every prompt."""
    after: str = _AFTER
    """End of every prompt."""

    def pair(self, instruction: str | None, query: str, document: str) -> str:
        """The middle of a prompt. `instruction` describes relevance (None: a web search)."""
        return f"<Instruct>: {instruction or _INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"


def read_reranking(checkpoint: Checkpoint, name: str, tokenizer: Tokenizer) -> RerankRecipe | None:
    """The recipe of a Qwen3-Reranker, or None."""
    if checkpoint.config.get("model_type") != "qwen3":
        return None
    scored = _logit_score(checkpoint.path)
    if scored is not None:
        return scored
    if not any("rerank" in text.lower() for text in (name, checkpoint.path.name)):
        return None
    yes, no = (tokenizer.encode(word, add_special_tokens=False) for word in ("yes", "no"))
    return RerankRecipe(yes[0], no[0]) if len(yes) == len(no) == 1 else None


def _logit_score(path: Path) -> RerankRecipe | None:
    """The recipe of the `LogitScore` in modules.json, or None."""
    if not (path / "modules.json").exists():
        return None
    names = [module.get("path") for module in modules_in(path) if str(module.get("type")).endswith(".LogitScore")]
    folder = path / str(names[0]) if names else None
    if folder is None or not folder.resolve().is_relative_to(path.resolve()):
        return None
    config = read_json_if_there(folder / "config.json")
    yes, no = config.get("true_token_id"), config.get("false_token_id")
    return RerankRecipe(yes, no if isinstance(no, int) else None) if isinstance(yes, int) else None
