"""A long transcript reads only new tokens in each turn, even if the template renders an earlier turn differently."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support.models.tiny_directory import JSON_CHARACTERS, tiny_directory

from mlxinfer import LLM, SamplingParams

MARKED = "{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
THINKING = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' and loop.index0 > ns.last %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}</s>\n{% endfor %}{% if add_generation_prompt %}[assistant]<think>{% endif %}"
)
UNMARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<A>{{ m.content|trim }}</s>{% else %}<U>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<A><think>{% endif %}"
)
TEMPLATES = {"marked": MARKED, "thinking": THINKING, "unmarked": UNMARKED}
LEFT_OVER = 24
"""Tokens of a generation prompt, which is read again with the answer."""
TURNS = 20


def model_of(folder: Path, architecture: str, template: str) -> Path:
    path = tiny_directory(folder / architecture, architecture, characters=JSON_CHARACTERS, context=8192)
    settings = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    return path


def common(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@pytest.mark.long
@pytest.mark.parametrize("architecture", ["llama", "qwen3_next"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_only_new_tokens_are_read(tmp_path: Path, architecture: str, template: str) -> None:
    """As an agent goes on: a question, three results of tools, the next question. Answers come back trimmed, and without their thinking."""
    messages = [{"role": "system", "content": "You are an agent. " * 10}]
    known: list[int] = []
    with LLM(model_of(tmp_path, architecture, TEMPLATES[template])) as llm:
        for turn in range(TURNS):
            messages.append({"role": "user" if turn % 4 == 0 else "tool", "content": f"Number {turn} of a few words. " * 3})
            prompt = llm.chat_prompt(messages).token_ids
            answer = llm.chat(messages, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
            reused, same = answer.usage.stats.reused_tokens, common(known, prompt)
            sys.stdout.write(f"turn {turn}: {len(prompt)} tokens, {len(prompt) - same} of them new, {len(prompt) - reused} read\n")
            assert reused >= same - LEFT_OVER
            known = prompt
            said = f"  Said {turn}. "
            messages.append({"role": "assistant", "content": said, "reasoning_content": f"Thought {turn}."})
