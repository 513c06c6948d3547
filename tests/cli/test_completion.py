from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PLACES = {
    "bash": ".local/share/bash-completion/completions/mlxinfer",
    "zsh": ".zfunc/_mlxinfer",
    "fish": ".config/fish/completions/mlxinfer.fish",
}


@pytest.fixture(autouse=True)
def no_moved_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "ZDOTDIR", "BASH_COMPLETION_USER_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def command(tmp_path: Path) -> Path:
    """A folder with `mlxinfer`, for a shell's path."""
    tool = tmp_path / "bin" / "mlxinfer"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m mlxinfer "$@"\n')
    tool.chmod(0o755)
    return tool.parent


def _shell(command: list[str], path: Path, home: Path) -> str:
    variables = os.environ | {"PATH": f"{path}:{os.environ['PATH']}", "HOME": str(home)}
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=60).stdout


@pytest.mark.parametrize("shell", PLACES)
def test_the_script_is_installed_in_an_account_without_such_folders(call, own_home, shell):
    result = call("completion", shell, "--install")
    assert result.code == 0
    assert str(own_home / PLACES[shell]) in result.out
    assert (own_home / PLACES[shell]).read_text() == call("completion", shell).out


def test_zsh_is_told_of_the_folder_once(call, own_home):
    own_home.mkdir()
    (own_home / ".zshrc").write_text("alias ll='ls -l'")
    for _ in range(2):
        assert call("completion", "zsh", "--install").code == 0
    text = (own_home / ".zshrc").read_text()
    assert text.startswith("alias ll='ls -l'\n")
    assert text.count("fpath+=~/.zfunc") == 1


def test_a_file_of_somebody_else_is_never_replaced(call, own_home):
    file = own_home / PLACES["fish"]
    file.parent.mkdir(parents=True)
    file.write_text("complete -c mlxinfer")
    result = call("completion", "fish", "--install")
    assert (result.code, result.out) == (2, "")
    assert "is not this script" in result.err
    assert file.read_text() == "complete -c mlxinfer"


def test_a_folder_that_cannot_be_written_is_named(call, own_home):
    own_home.write_text("")
    result = call("completion", "fish", "--install")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "cannot write" in result.err


def test_fish_shows_whole_descriptions(call, own_home, command):
    assert 'string split --max 1 ","' in call("completion", "fish").out
    fish = shutil.which("fish")
    if fish is None:
        pytest.skip("there is no fish")
    call("completion", "fish", "--install")
    offered = _shell([fish, "-c", 'complete -C "mlxinfer "'], command, own_home)
    assert "completion\tShell completion for bash, zsh and fish." in offered.splitlines()


def test_zsh_finds_what_was_installed(call, own_home, command):
    zsh = shutil.which("zsh")
    if zsh is None:
        pytest.skip("there is no zsh")
    call("completion", "zsh", "--install")
    assert _shell([zsh, "-ic", "print $_comps[mlxinfer]"], command, own_home).strip() == "_mlxinfer"


def test_files_are_offered_after_an_at_sign(tmp_path):
    (tmp_path / "a prompt.txt").touch()
    (tmp_path / "a folder").mkdir()
    variables = os.environ | {
        "COMP_WORDS": f"mlxinfer chat x --system @{tmp_path}/a",
        "COMP_CWORD": "4",
        "_MLXINFER_COMPLETE": "bash_complete",
    }
    done = subprocess.run([sys.executable, "-m", "mlxinfer"], env=variables, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.stdout.splitlines() == [f"plain,@{tmp_path}/a folder/", f"plain,@{tmp_path}/a prompt.txt"]


def test_the_shell_is_the_user_s_own_by_default(call, own_home, monkeypatch):
    monkeypatch.setenv("SHELL", "/usr/local/bin/fish")
    assert str(own_home / PLACES["fish"]) in call("completion", "--install").out
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    refused = call("completion", "--install")
    assert (refused.code, refused.err) == (2, "mlxinfer: which shell? bash, zsh, fish (see 'mlxinfer completion --help')\n")
