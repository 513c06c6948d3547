"""The options of the engine are its settings, and say what is wrong by their own names."""

from __future__ import annotations

import pytest

from mlxinfer.cli.bench import bench
from mlxinfer.cli.chat import chat
from mlxinfer.cli.run import run
from mlxinfer.cli.serve import serve
from mlxinfer.config import settings

NAMES = {one.name for one, _ in settings()} - {"path_or_id"}


@pytest.mark.parametrize("command", [run, chat, serve])
def test_every_setting_has_an_option(command):
    options = {parameter.name: parameter for parameter in command.params}
    assert set(options) >= NAMES
    for one, _ in settings():
        if one.name in NAMES:
            assert options[one.name].default == one.default


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


def test_options_reach_the_engine(call, chat_model):
    given = ("--max-num-seqs", "2", "--max-waiting", "3", "--decode-share", "0.5", "--max-step-s", "0.2")
    assert call("run", chat_model, "hello", "--temperature", "0", "--max-tokens", "4", *given).code == 0
