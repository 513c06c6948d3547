from __future__ import annotations

from math import exp, log

import pytest
from support.models.tiny_directory import tiny_directory
from support.processes.optional import needs

from mlxinfer import LLM
from mlxinfer.errors import MLXInferError
from mlxinfer.notebook import lens_picture, logprobs_picture
from mlxinfer.notebook.plots.tokens import MOST_TOKENS
from mlxinfer.types import Completion, TokenLogprob, Usage

needs("matplotlib")

TOKENS = [
    TokenLogprob(5, " Paris", log(0.9), ((5, " Paris", log(0.9)), (7, "\n", log(0.05)))),
    TokenLogprob(9, "$x_1$", log(0.05), ((7, "$", log(0.6)), (9, "$x_1$", log(0.05)))),
]


def completion(logprobs: list[TokenLogprob] | None) -> Completion:
    return Completion("", [], "stop", Usage(1, 1), logprobs)


def test_a_bar_per_token():
    picture = logprobs_picture(completion(TOKENS))
    axes = picture.figure.axes[0]
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([exp(token.logprob) for token in TOKENS])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["' Paris'", "'\\$x_1\\$'"]
    assert [text.get_text() for text in axes.texts] == [r"'\n' 0.05", r"'\$' 0.60"]
    png = picture._repr_png_()
    assert png.startswith(b"\x89PNG")
    assert len(png) > 5000


def test_a_long_answer_is_cut():
    assert len(logprobs_picture(completion(TOKENS * MOST_TOKENS)).figure.axes[0].patches) == MOST_TOKENS


def test_without_logprobs_it_says_how_to_get_them():
    with pytest.raises(MLXInferError, match="logprobs=2"):
        logprobs_picture(completion(None))


def test_a_lens_is_drawn_from_a_trace_and_from_itself(tmp_path):
    with LLM(tiny_directory(tmp_path / "tiny", eos=False)) as llm:
        trace = llm.trace("hello", what="residual")
        lens = trace.logit_lens()
        first, second = ([text.get_text() for text in lens_picture(each).figure.axes[0].texts] for each in (trace, lens))
    assert first == second
    assert len(second) == len(lens.layers) * len(trace)
    assert repr(lens) == f"LogitLens(4 layers, 5 tokens, which ends in {lens.texts[-1][-1]!r})"
