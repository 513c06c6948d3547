"""Conversations with a model that thinks: what is kept of its answers, and how they go on."""

from __future__ import annotations

import json

import pytest
from support.models.tiny_directory import JSON_CHARACTERS, tiny_directory

from mlxinfer import LLM, SamplingParams
from mlxinfer.cli.repl.conversation import Conversation
from mlxinfer.cli.repl.saved import read, save

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant]<think>\n{% endif %}"
)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    path = tiny_directory(tmp_path_factory.mktemp("models") / "tiny", "qwen3", characters=JSON_CHARACTERS, context=4096)
    settings = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    with LLM(path) as llm:
        yield llm


def params(**changes):
    return SamplingParams(**{"temperature": 1.0, "seed": 1, "max_tokens": 40, "thinking_token_budget": 12, "ignore_eos": True} | changes)


def test_reasoning_is_kept_apart_and_handed_back(llm, tmp_path):
    conversation = Conversation(llm, params())
    chunks = list(conversation.ask("Hello"))
    answer = conversation.turns[-1]
    assert answer["content"] == "".join(chunk.text for chunk in chunks)
    assert 0 < len(answer["reasoning"]) <= 12
    assert "think>" not in answer["content"]
    list(conversation.ask("And?"))
    assert f"<think>\n{answer['reasoning']}\n</think>" in llm.tokenizer.decode(conversation._prompt([]).token_ids)
    save(tmp_path / "talk.json", conversation.snapshot())
    other = Conversation(llm, params())
    other.restore(read(tmp_path / "talk.json"))
    assert other.turns == conversation.turns
    assert conversation.undo() == "And?"


def test_an_answer_goes_on_in_the_part_in_which_it_stopped(llm):
    conversation = Conversation(llm, params(max_tokens=5, thinking_token_budget=None))
    list(conversation.ask("Hello"))
    before = conversation.turns[-1]
    assert before["content"] == ""
    conversation.set("thinking_token_budget", 6)
    conversation.set("max_tokens", 30)
    list(conversation.resume())
    after = conversation.turns[-1]
    assert after["reasoning"].startswith(before["reasoning"])
    assert after["content"]
    assert len(conversation.turns) == 2
