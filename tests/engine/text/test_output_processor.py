"""The text of a sequence's tokens."""

from __future__ import annotations

from support.tokenizers.golden_tokenizers import golden_tokenizer

from mlxinfer.engine.core.events import Token
from mlxinfer.engine.core.sequence import Sequence
from mlxinfer.engine.text.output_processor import RequestOutput
from mlxinfer.types import SamplingParams


def test_an_answer_that_ends_in_a_step_of_several_tokens_has_all_of_them() -> None:
    tokenizer = golden_tokenizer("smollm2")
    ids = tokenizer.encode(" one two three")
    sequence = Sequence([1, 2], SamplingParams(), seed=0, max_length=2 + len(ids))
    answer = RequestOutput(sequence, tokenizer)
    assert sequence.append(ids, 0.0) == len(ids)
    chunks = [answer.take(Token(sequence, token)) for token in ids]
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(ids) - 1) + ["length"]
    assert [chunk.usage is None for chunk in chunks] == [True] * (len(ids) - 1) + [False]
    assert "".join(chunk.text for chunk in chunks) == " one two three"
    assert answer.completion().token_ids == ids
