"""`mlxinfer run --batch`: JSON lines in, JSON lines out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlxinfer import LLM, SamplingParams

GREEDY = ("-t", "0", "--max-tokens", "6", "-q")


@pytest.fixture(scope="module")
def llm(chat_model):
    with LLM(chat_model) as llm:
        yield llm


def written(path: Path, *lines: object) -> str:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n\n")
    return str(path)


def test_prompts_are_answered_in_their_order(call, chat_model, llm, tmp_path):
    batch = {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions"}
    body = {"model": "any", "messages": [{"role": "user", "content": "bye"}], "max_completion_tokens": 3}
    file = written(tmp_path / "p.jsonl", '"hello"', {"id": "b", "prompt": "hi", "system": "be brief", "seed": 5}, {**batch, "body": body})
    result = call("run", chat_model, "--batch", file, *GREEDY)
    assert (result.code, result.err) == (0, "")
    found = [json.loads(line) for line in result.out.splitlines()]
    assert [each["custom_id"] for each in found] == [1, "b", "c"]
    greedy = SamplingParams(temperature=0, max_tokens=6)
    brief = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    short = llm.chat("bye", temperature=0, max_tokens=3)
    assert [each["text"] for each in found] == [llm.chat("hello", greedy).text, llm.chat(brief, greedy).text, short.text]
    assert found[2]["completion_tokens"] == 3
    raw = call("run", chat_model, "--batch", "-", "--raw", *GREEDY, stdin='"hello"\n')
    assert json.loads(raw.out)["text"] == llm.generate("hello", greedy)[0].text


def test_a_prompt_that_fails_leaves_the_others(call, chat_model, tmp_path):
    result = call("run", chat_model, "--batch", written(tmp_path / "p.jsonl", '"hello"', {"prompt": "x" * 900}, '"bye"'), *GREEDY)
    found = [json.loads(line) for line in result.out.splitlines()]
    assert result.code == 2
    assert ["error" in each for each in found] == [False, True, False]
    assert "256" in found[1]["error"]
    raw = call("run", chat_model, "--raw", "--batch", str(tmp_path / "p.jsonl"), *GREEDY)
    assert ["error" in json.loads(line) for line in raw.out.splitlines()] == [False, True, False]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"prompt": ', "line 2: Expecting value"),
        ('{"prompt": "a", "messages": []}', "line 2: either prompt or messages is needed"),
        ('{"prompt": "a", "temprature": 1}', "line 2: 'temprature' is not a key"),
        ('{"prompt": "a", "temperature": -1}', "line 2: temperature must"),
        ("7", "line 2: a text or an object is needed, not 7"),
    ],
)
def test_a_faulty_line_is_named_before_the_model_is_loaded(call, tmp_path, line, told):
    result = call("run", "no/such/model", "--batch", written(tmp_path / "p.jsonl", '"hello"', line))
    assert (result.code, result.out) == (2, "")
    assert told in result.err


def test_what_does_not_go_with_a_batch_is_refused(call, chat_model, tmp_path):
    file = written(tmp_path / "p.jsonl", '"hello"')
    assert "leave PROMPT out" in call("run", chat_model, "hi", "--batch", file).err
    assert "-c does not go with --batch" in call("run", chat_model, "-c", "--batch", file).err
    assert "cannot read nosuch" in call("run", chat_model, "--batch", "nosuch").err
    assert "has no prompts" in call("run", chat_model, "--batch", written(tmp_path / "empty")).err
