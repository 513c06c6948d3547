"""`mlxinfer run -c`: the last conversation, of a run or of a chat."""

from __future__ import annotations

import sys
from pathlib import Path

import pexpect
import pytest
from support.processes.terminal import end

from mlxinfer import LLM, SamplingParams
from mlxinfer.cli.repl.saved import Archive, Saved, read

SHORT = ("-t", "0", "--max-tokens", "6", "-q")


@pytest.fixture(scope="module")
def llm(chat_model):
    with LLM(chat_model) as llm:
        yield llm


def answer(llm: LLM, *texts: str) -> str:
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]
    return llm.chat(messages, SamplingParams(temperature=0, max_tokens=6)).text


def test_the_last_prompt_is_continued(call, chat_model, llm):
    first = answer(llm, "hello")
    assert call("run", chat_model, "hello", "--keep", *SHORT).out == first + "\n"
    second = answer(llm, "hello", first, "and then?")
    assert call("run", "-c", "and then?", *SHORT).out == second + "\n", "with its model"
    third = answer(llm, "hello", first, "and then?", second, "more")
    assert call("run", "-c", *SHORT, stdin="more").out == third + "\n"
    (path,) = Archive().files()
    kept = read(path)
    assert [turn["content"] for turn in kept.turns] == ["hello", first, "and then?", second, "more", third]
    assert (kept.source, kept.params) == (chat_model, SamplingParams(temperature=0, max_tokens=6))


def test_a_chat_and_a_run_continue_each_other(call, chat_model, llm):
    call("chat", chat_model, "--keep", *SHORT, stdin="hello\n")
    first = answer(llm, "hello")
    second = call("run", "-c", "go on", *SHORT).out
    assert second == answer(llm, "hello", first, "go on") + "\n"
    assert call("chat", "-c", *SHORT, stdin="more\n").out.strip() == answer(llm, "hello", first, "go on", second[:-1], "more").strip()
    assert len(Archive().files()) == 1


def test_pipes_keep_nothing_unless_asked(call, chat_model):
    assert call("run", chat_model, "hello", *SHORT).code == 0
    assert Archive().files() == []
    missing = call("run", "-c", "hello", *SHORT)
    assert (missing.code, missing.err) == (2, "mlxinfer: Nothing to continue: no conversation has been kept yet.\n")
    call("run", chat_model, "hello", "--keep", "--n", "2", *SHORT)
    assert Archive().files() == [], "several answers are not a conversation"


def test_a_continued_conversation_may_stay_as_it_is(call, chat_model):
    call("run", chat_model, "hello", "--keep", "-s", "be brief", *SHORT)
    call("run", "-c", "again", "--no-keep", *SHORT)
    kept = read(Archive().latest())
    assert (len(kept.turns), kept.system) == (2, "be brief")
    assert "--continue needs a chat template" in call("run", "-c", "again", "--raw", *SHORT).err


def test_a_terminal_keeps_a_prompt(chat_model, own_home: Path):
    command = f"run {chat_model} hello -t 0 --max-tokens 3"
    run = pexpect.spawn(sys.executable, ["-m", "mlxinfer", *command.split()], encoding="utf-8", timeout=60)
    run.expect(pexpect.EOF)
    end(run)
    assert isinstance(read(Archive().latest()), Saved)
