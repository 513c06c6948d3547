"""What a causal language model that reranks is asked, and which of its tokens mean yes and no.

Qwen3-Reranker is asked as its page says (https://huggingface.co/Qwen/Qwen3-Reranker-0.6B). Its first checkpoints do not tell that they are
rerankers, so that the name has to; later ones have a `LogitScore` of sentence-transformers in modules.json.
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
    """How a pair is put to the model. Its relevance is the probability of `yes` against `no` after `after`."""

    yes: int
    """Token id."""
    no: int | None
    """Token id; None: the logit of `yes` alone counts."""
    before: str = _BEFORE
    """What every prompt begins with."""
    after: str = _AFTER
    """What it ends with."""

    def pair(self, instruction: str | None, query: str, document: str) -> str:
        """What stands between; `instruction` says what makes a document relevant (None: that it answers a web search)."""
        return f"<Instruct>: {instruction or _INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"


def read_reranking(checkpoint: Checkpoint, name: str, tokenizer: Tokenizer) -> RerankRecipe | None:
    """The recipe of a Qwen3-Reranker; None for any other model."""
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
    """What modules.json says, where it names a `LogitScore`."""
    if not (path / "modules.json").exists():
        return None
    names = [module.get("path") for module in modules_in(path) if str(module.get("type")).endswith(".LogitScore")]
    folder = path / str(names[0]) if names else None
    if folder is None or not folder.resolve().is_relative_to(path.resolve()):
        return None
    config = read_json_if_there(folder / "config.json")
    yes, no = config.get("true_token_id"), config.get("false_token_id")
    return RerankRecipe(yes, no if isinstance(no, int) else None) if isinstance(yes, int) else None
