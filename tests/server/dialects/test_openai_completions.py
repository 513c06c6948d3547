"""Completions: OpenAI's own client against a live server."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
from support.processes.optional import needs

if TYPE_CHECKING:
    from openai import OpenAI

openai = needs("openai")

PROMPT = "Once upon a time"


NO_SPECIAL = {"0": -100, "1": -100, "2": -100}
"""A bias against special tokens: every other token is a character."""


def create(client: OpenAI, **more: Any) -> Any:
    settings = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 10, "logit_bias": NO_SPECIAL}
    return client.completions.create(**{**settings, **more})


def joined(chunks: list[Any]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        texts[choice.index] = texts.get(choice.index, "") + choice.text
    return texts


def test_whole_and_in_pieces(client: OpenAI) -> None:
    answer = create(client)
    (choice,) = answer.choices
    assert (answer.object, choice.finish_reason, len(choice.text)) == ("text_completion", "length", 10)
    assert answer.usage.prompt_tokens == len(PROMPT)
    chunks = list(create(client, stream=True, stream_options={"include_usage": True}))
    assert joined(chunks) == {0: choice.text}
    assert [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason] == ["length"]
    assert chunks[-1].usage.total_tokens == answer.usage.total_tokens


def test_sixteen_tokens_where_nothing_is_said(unix_client: OpenAI) -> None:
    assert create(unix_client, max_tokens=None).usage.completion_tokens == 16


def test_prompts_by_the_list_as_text_and_as_tokens(client: OpenAI) -> None:
    one, two = (create(client, prompt=prompt).choices[0].text for prompt in ("Hello", "World"))
    both = create(client, prompt=["Hello", "World"])
    assert [choice.text for choice in both.choices] == [one, two]
    assert both.usage.total_tokens == 30
    assert joined(list(create(client, prompt=["Hello", "World"], stream=True))) == {0: one, 1: two}
    assert create(client, prompt=[[3 + i for i in range(4)], [9, 10]], n=2).choices[3].index == 3


def test_echo(client: OpenAI) -> None:
    text = create(client).choices[0].text
    assert create(client, echo=True).choices[0].text == PROMPT + text
    assert joined(list(create(client, echo=True, stream=True))) == {0: PROMPT + text}


def test_logprobs_of_the_answer(client: OpenAI) -> None:
    (choice,) = create(client, logprobs=2).choices
    found = choice.logprobs
    assert "".join(found.tokens) == choice.text
    assert found.text_offset == list(range(10))
    for token, logprob, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert math.isclose(top[token], logprob)
        assert len(top) in (2, 3)
    streamed = [choice.logprobs for chunk in create(client, logprobs=2, stream=True) for choice in chunk.choices if choice.logprobs]
    assert [value for piece in streamed for value in piece.token_logprobs] == found.token_logprobs
    assert [value for piece in streamed for value in piece.text_offset] == found.text_offset


def test_logprobs_of_the_prompt(client: OpenAI) -> None:
    """Scoring as an evaluation harness does: the same numbers as if the text had been generated."""
    text = PROMPT + create(client).choices[0].text
    generated = create(client, logprobs=1).choices[0].logprobs
    for max_tokens in (0, 1):
        (choice,) = create(client, prompt=text, echo=True, logprobs=1, max_tokens=max_tokens).choices
        read = choice.logprobs
        assert choice.text[: len(text)] == text
        assert len(read.tokens) == len(text) + max_tokens
        assert (read.token_logprobs[0], read.top_logprobs[0]) == (None, None)
        assert read.token_logprobs[len(PROMPT) : len(text)] == pytest.approx(generated.token_logprobs, abs=1e-4)
        assert read.tokens[len(PROMPT) : len(text)] == generated.tokens
        assert read.text_offset == list(range(len(read.tokens)))
        (streamed,) = (
            {"tokens": [t for c in chunks for t in c.logprobs.tokens]}
            for chunks in [
                [
                    c
                    for chunk in create(client, prompt=text, echo=True, logprobs=1, max_tokens=max_tokens, stream=True)
                    for c in chunk.choices
                    if c.logprobs
                ]
            ]
        )
        assert streamed["tokens"] == read.tokens


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 2}, "best_of"),
        ({"suffix": "the end"}, "suffix"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["a"] * 257}, "prompt"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"echo": 1}, "echo"),
        ({"messages": []}, "messages"),
    ],
)
def test_what_is_refused(unix_client: OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as found:
        unix_client.completions.create(model="tiny", prompt=fields.get("prompt", PROMPT), extra_body=fields)
    assert found.value.param == param


def test_token_ids_that_the_model_has_not(unix_client: OpenAI) -> None:
    for ids in ([5, 1_000_000], [-1]):
        with pytest.raises(openai.BadRequestError, match="token id"):
            create(unix_client, prompt=ids)
