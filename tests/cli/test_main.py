from __future__ import annotations

import json
import subprocess
import sys

import pytest

from mlxinfer import __version__
from mlxinfer.cli import cli


def test_help_and_version(call):
    assert call("--version").out == f"mlxinfer, version {__version__}\n"
    assert call().out == call("--help").out == call("-h").out
    for command in cli.list_commands(None):
        assert command in call("--help").out
        assert call(command, "--help").code == 0


@pytest.mark.parametrize("arguments", [["fly"], ["--fly"], ["completion", "tcsh"], ["completion"]], ids=" ".join)
def test_usage_errors_are_one_line(call, arguments):
    result = call(*arguments)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert "--help" in result.err


def test_a_bug_of_ours_keeps_its_traceback(call, monkeypatch):
    from mlxinfer.cli import diagnosis

    monkeypatch.setattr(diagnosis, "device_memory", lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        call("doctor")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_names_its_variable(call, shell):
    assert "_MLXINFER_COMPLETE" in call("completion", shell).out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("mlxinfer ch", {"chat"}),
        ("mlxinfer models ", {"list", "show", "pull", "rm"}),
        ("mlxinfer run smo", {"smollm2"}),
        ("mlxinfer run --rep", {"--repetition-penalty"}),
    ],
)
def test_completion_answers(words, expected):
    last = words.split(" ")
    variables = {"COMP_WORDS": words, "COMP_CWORD": str(len(last) - 1), "_MLXINFER_COMPLETE": "bash_complete"}
    command = [sys.executable, "-c", "from mlxinfer.cli import main; main()"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    offered = {line.partition(",")[2] for line in done.stdout.splitlines() if line.startswith("plain")}
    assert expected <= offered
    assert json.dumps(done.stderr) == '""'
