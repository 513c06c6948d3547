"""The options of the engine are its settings, and say what is wrong by their own names."""

from __future__ import annotations

import pytest

from mlxinfer.cli.bench import bench
from mlxinfer.cli.chat import chat
from mlxinfer.cli.run import run
from mlxinfer.cli.serve import serve
from mlxinfer.config import settings
from mlxinfer.engine.llm import LLM

NAMES = {one.name for one, _ in settings()} - {"path_or_id"}


@pytest.mark.parametrize("command", [run, chat, serve])
def test_every_setting_has_an_option(command):
    options = {parameter.name: parameter for parameter in command.params}
    names = {one.name for one, how in settings() if how.command != "serving" or command is serve} & NAMES
    assert set(options) & NAMES == names
    for one, _ in settings():
        if one.name in names:
            alone = one.name == "max_num_seqs" and command is not serve
            assert options[one.name].default == (1 if alone else one.default)


def test_only_a_server_reads_prompts_for_others():
    assert [command for command in (run, chat, serve) if "kv_producer" in {parameter.name for parameter in command.params}] == [serve]


def test_bench_has_what_is_not_for_answering():
    assert {parameter.name for parameter in bench.params} & NAMES == {one.name for one, how in settings() if how.command == "all"} & NAMES


def test_flags_keep_their_names():
    flags = {flag for parameter in run.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    kept = "dtype kv kv-first16 bits group-size max-context memory deterministic draft speculate no-speculate prefix-cache no-prefix-cache"
    added = "prefix-disk prefix-dir max-num-seqs max-sequences max-waiting decode-share max-step-s"
    assert {f"--{name}" for name in f"{kept} {added}".split()} <= flags


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["--max-sequences", "0"], "--max-num-seqs"),
        (["--max-waiting", "0"], "--max-waiting"),
        (["--decode-share", "1.5"], "--decode-share"),
        (["--max-step-s", "0"], "--max-step-s"),
        (["--memory", "nan"], "--memory"),
        (["--prefix-disk", "-1"], "--prefix-disk"),
        (["--max-tokens", "0"], "--max-tokens"),
        (["--top-k", "-5"], "--top-k"),
        (["--stop", ""], "--stop"),
    ],
)
def test_an_error_names_the_option(call, arguments, option):
    result = call("run", "no/such/model", "hi", *arguments)
    assert result.code == 2
    assert result.err.startswith(f"mlxinfer: {option} must be")
    assert result.err.count("\n") == 1


@pytest.fixture
def opened(monkeypatch) -> list[LLM]:
    """The models that commands load."""
    found: list[LLM] = []

    class Seen(LLM):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            found.append(self)
            self.sequences = self.plan.max_num_seqs

    monkeypatch.setattr("mlxinfer.LLM", Seen)
    return found


@pytest.mark.parametrize(
    ("arguments", "sequences"),
    [
        (["run", "MODEL", "hi"], 1),
        (["run", "MODEL", "hi", "--n", "3"], 3),
        (["run", "MODEL", "hi", "--n", "3", "--max-num-seqs", "2"], 2),
        (["run", "MODEL", "hi", "--max-sequences", "5"], 5),
        (["chat", "MODEL"], 1),
        (["chat", "MODEL", "--max-num-seqs", "4"], 4),
    ],
)
def test_memory_is_planned_for_the_answers_that_are_asked_for(call, chat_model, opened, arguments, sequences):
    given = [chat_model if argument == "MODEL" else argument for argument in arguments]
    assert call(*given, "--max-tokens", "2", "--temperature", "0", stdin="hi\n").code == 0
    assert [llm.sequences for llm in opened] == [sequences]


def test_options_reach_the_engine(call, chat_model):
    given = ("--max-num-seqs", "2", "--max-waiting", "3", "--decode-share", "0.5", "--max-step-s", "0.2")
    assert call("run", chat_model, "hello", "--temperature", "0", "--max-tokens", "4", *given).code == 0
