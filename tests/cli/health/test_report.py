from __future__ import annotations

import getpass
import os
import platform
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mlxinfer import __version__
from mlxinfer.cli.health import report
from mlxinfer.util.private_text import HIDDEN, settings_of, without_private

ROOT = Path(__file__).parents[3]
SECTIONS = ["machine", "versions", "memory", "settings", "server", "attention", "plan", "speed", "errors of kernels"]


@pytest.fixture
def somebody(monkeypatch, tmp_path):
    """A user, a machine, a home and keys that are easily found again."""
    home = tmp_path / "Users" / "quentin"
    home.mkdir(parents=True)
    for name, value in {
        "HOME": str(home),
        "USER": "quentin",
        "LOGNAME": "quentin",
        "MLXINFER_API_KEY": "open-sesame-1234",
        "HF_TOKEN": "hf_abcdefghijklmnop",
        "MLXINFER_HOME": str(home / ".mlxinfer"),
        "MLX_MAX_OPS_PER_BUFFER": "50",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(getpass, "getuser", lambda: "quentin")
    monkeypatch.setattr(platform, "node", lambda: "Quentins-MacBook.local")
    monkeypatch.setattr(socket, "gethostname", lambda: "Quentins-MacBook.local")
    return home


def test_names_paths_and_keys_are_taken_out(somebody):
    text = f"""{somebody}/models/x.gguf and {somebody}: quentin at Quentins-MacBook.local (quentins-macbook)
    /Users/other/secret /home/third/x key open-sesame-1234, token hf_abcdefghijklmnop, sk-abcdefghijk http://me:word@proxy:80
    /Volumes/Third disk/models: -InternalBattery-0 (id=12345678) 80%"""
    found = without_private(text)
    for private_word in ("quentin", "macbook", "other", "third", "sesame", "abcdefghij", "me:word", "12345678", str(somebody)):
        assert private_word not in found.lower(), private_word
    assert "~/models/x.gguf and ~: USER at HOST" in found
    assert "/Volumes/DISK/models: -InternalBattery-0 (id) 80%" in found


def test_names_can_be_taken_out_before_anything_is_installed():
    """`make mac-report` also tells of an installation that failed."""
    script = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from mlxinfer.util import private_text as p; print(p.without_private('x'))"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "x\n"


def test_what_only_looks_like_a_name_stays(somebody):
    assert without_private("quentinesque M4 Max, /usr/lib, 127.0.0.1") == "quentinesque M4 Max, /usr/lib, 127.0.0.1"


def test_settings_are_named_and_keys_hidden(somebody):
    found = settings_of(os.environ)
    assert found["MLX_MAX_OPS_PER_BUFFER"] == "50"
    assert found["MLXINFER_API_KEY"] == HIDDEN
    assert "HF_TOKEN" not in found


def test_a_report_has_its_parts_and_no_names(call, chat_model, somebody, tmp_path, monkeypatch):
    file = tmp_path / "report.md"
    result = call("doctor", chat_model, "--report", str(file))
    assert (result.code, result.err) == (0, "")
    text = file.read_text(encoding="utf-8")
    assert [line[3:] for line in text.splitlines() if line.startswith("## ")] == SECTIONS
    assert f"mlxinfer: {__version__}" in text
    assert text.count("\n- system: ") == 1
    assert "MLX_MAX_OPS_PER_BUFFER=50" in text
    assert f"MLXINFER_API_KEY={HIDDEN}" in text
    assert "kv 4: " in text
    assert "prefill 128: " in text
    assert "tokens/s" in text
    assert "not found out" not in text
    lower = text.lower()
    for word in ("quentin", "macbook", "sesame", "abcdefghij", str(somebody).lower(), str(Path(chat_model).parent).lower()):
        assert word not in lower, word


def test_products_of_a_gpu_are_told(chat_model, monkeypatch):
    products, choices = ["affine 4/64 bfloat16: 2 rows 1.5 times as fast"], ["sums with norms: this project's kernel"]
    found = replace(report.diagnose(), gpu_products=products, gpu_choices=choices, float32="rounded to TF32")
    monkeypatch.setattr(report, "diagnose", lambda: found)
    monkeypatch.setattr(report, "_speed", lambda model: iter(["quick"]))
    text = report.report(chat_model)
    assert f"- {choices[0]}\n- {products[0]}\n" in text
    assert "- rounded to TF32\n" in text


def test_a_part_that_fails_says_why_and_the_others_are_there(chat_model, somebody, monkeypatch):
    def broken() -> None:
        raise RuntimeError(f"no metal in {somebody}/x")

    monkeypatch.setattr(report, "diagnose", broken)
    monkeypatch.setattr(report, "_speed", lambda model: iter(["quick"]))
    text = report.report(chat_model)
    assert text.count("unknown: RuntimeError: no metal in ~/x") == 3
    assert "open files: " in text
    assert "- quick\n" in text


def test_the_socket_of_the_server_is_tried(call, somebody, monkeypatch):
    monkeypatch.setattr(report, "local_models", list)
    # A Mac's own temporary directories are longer than a socket's path may be.
    directory = Path("/tmp") / f"mlxinfer-report-{os.getpid()}"
    directory.mkdir(mode=0o700)
    try:
        monkeypatch.setenv("MLXINFER_SOCKET", str(directory / "api.sock"))
        assert "a socket there: can be made" in report.report(None)
        assert list(directory.iterdir()) == []
        monkeypatch.setenv("MLXINFER_SOCKET", str(directory / "missing" / "api.sock"))
        assert "its directory: missing" in report.report(None)
    finally:
        directory.rmdir()


def test_a_file_that_cannot_be_written_is_one_line(call, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "report", lambda model: "text")
    result = call("doctor", "--report", str(tmp_path / "none" / "report.md"))
    assert result.code == 1
    assert "cannot write" in result.err


def test_no_file_but_a_report_is_replaced(call, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "report", lambda model: "# mlxinfer doctor\nnew")
    model, old = tmp_path / "model.gguf", tmp_path / "report.md"
    model.write_bytes(b"GGUF")
    old.write_text("# mlxinfer doctor\nold")
    assert call("doctor", "--report", str(model)).code == 2
    assert model.read_bytes() == b"GGUF"
    assert "name the model first: mlxinfer doctor smollm2 --report" in " ".join(call("doctor", "--report", "smollm2").err.split())
    assert call("doctor", "--report", str(old)).code == 0
    assert old.read_text().endswith("new")
