"""The options of the engine are its settings, and say what is wrong by their own names."""

from __future__ import annotations

import pytest

from mlxinfer.cli.bench import bench
from mlxinfer.cli.chat import chat
from mlxinfer.cli.common.options import with_flags
from mlxinfer.cli.run import run
from mlxinfer.cli.serve import serve
from mlxinfer.config import CHAT_TEMPERATURE, settings
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
            expected = {"max_num_seqs": 1 if alone else one.default, "vision": None}  # None: neither --vision nor --no-vision
            assert options[one.name].default == expected.get(one.name, one.default)


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
        (["--experts-memory", "-2"], "--experts-memory"),
        (["--prefix-disk", "-1"], "--prefix-disk"),
        (["--max-tokens", "0"], "--max-tokens"),
        (["--top-k", "-5"], "--top-k"),
        (["--stop", ""], "--stop"),
    ],
)
def test_an_error_names_the_option(call, arguments, option):
    result = call("run", "no/such/model", "hi", *arguments)
    assert result.code == 2
    assert result.err.startswith(f"mlxinfer: {option} must ")
    assert result.err.count("\n") == 1


def test_a_setting_takes_a_number_or_a_word(call):
    result = call("run", "no/such/model", "hi", "--experts-memory", "most")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "'most' is neither a number nor auto" in result.err


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


@pytest.mark.parametrize("command", ["run", "chat", "serve", "embed", "bench"])
def test_long_help_is_in_groups_with_examples(call, command):
    shown = call(command, "--help").out
    titles = [line for line in shown.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles[0] == "Options:"
    assert "Model and memory:" in titles
    assert "\n  Examples:\n" in shown
    assert f"mlxinfer {command} " in shown.partition("Examples:")[2]


def test_embed_has_only_options_that_change_a_vector(call):
    shown = call("embed", "--help").out
    assert "--memory" in shown
    for foreign in ("--draft", "--adapter", "--decode-share", "--tool-format", "--speculate"):
        assert foreign not in shown


@pytest.mark.parametrize("spelled", [["--temp", "0"], ["-t", "0"]])
def test_options_as_other_tools_spell_them(call, chat_model, spelled):
    plain = call("run", chat_model, "hello", "--system", "be brief", "--temperature", "0", "--max-tokens", "4")
    assert plain.code == 0
    assert call("run", "-m", chat_model, "hello", "-s", "be brief", *spelled, "--max-tokens", "4") == plain
    assert call("run", "hello", f"--model={chat_model}", "-s", "be brief", *spelled, "--max-tokens", "4") == plain


def test_the_help_says_which_temperature_is_the_default(call):
    default = "what the model's authors recommend, else "
    assert f"{default}0]" in " ".join(call("run", "--help").out.split())
    assert f"{default}{CHAT_TEMPERATURE}]" in " ".join(call("chat", "--help").out.split())


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("0.1 GB may be used (memory_gb)", "0.1 GB may be used (--memory)"),
        ("kv_first16 needs kv 8, 4 or k8v4 as well", "--kv-first16 needs --kv 8, 4 or k8v4 as well"),
        ("kv takes 16, 8 or 4, not 7", "--kv takes 16, 8 or 4, not 7"),
        (
            "cannot read /models/max_context/x: 'max_context' in config.json",
            "cannot read /models/max_context/x: 'max_context' in config.json",
        ),
    ],
)
def test_errors_name_options_instead_of_settings(message, shown):
    assert with_flags(message) == shown
