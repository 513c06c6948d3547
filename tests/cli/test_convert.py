from __future__ import annotations

import json
import shutil
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import pytest
from support.models.checkpoints import config_of, random_checkpoint

from mlxinfer.cli.common.stages import Stages
from mlxinfer.convert.report import Quality

QUICK = ("--no-measure",)


@pytest.fixture
def wide(chat_model: str, tmp_path: Path) -> str:
    """A chat model whose rows groups of 32 divide."""
    target = random_checkpoint(tmp_path / "wide", config_of("llama"))
    for file in Path(chat_model).glob("tokenizer*"):
        shutil.copy2(file, target)
    return str(target)


@pytest.mark.long
def test_the_result_runs_and_the_report_tells_its_size(call, wide, tmp_path):
    target = tmp_path / "small"
    result = call("convert", wide, str(target), "--bits", "4", "--group-size", "32", *QUICK)
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith(f"{target}\n")
    shown = json.loads(call("models", "show", str(target), "--json").out)
    assert f"{shown['bits_per_weight']:.2f} bits per weight" in result.out
    assert "tensors quantized" in result.out
    assert "largest relative error 0.0" in result.out
    quantization = json.loads((target / "config.json").read_text())["quantization"]
    assert (quantization["bits"], quantization["group_size"]) == (4, 32)
    assert call("run", str(target), "hello", "--max-tokens", "3").code == 0


@pytest.mark.long
def test_the_loss_is_measured_when_asked(call, wide, tmp_path):
    result = call("convert", wide, str(tmp_path / "small"), "--bits", "3", "--group-size", "32", "--measure")
    assert "against the source: KL" in result.out


@pytest.mark.parametrize(
    ("kl", "top1", "last"),
    [
        (
            2.1795,
            0.266,
            "This model is unusable: three of four words change.\nMore bits lose less (--bits, --bpw), and so does --encoder gptq.",
        ),
        (0.0437, 0.879, "This model is close to its source: one of eight words changes."),
    ],
)
def test_the_last_line_says_what_the_figures_mean(call, wide, tmp_path, monkeypatch, kl, top1, last):
    quality = Quality(kl=kl, top1=top1, tokens=256)
    monkeypatch.setattr("mlxinfer.convert.pipeline.measure_loss", lambda *_, **__: quality)
    out = tmp_path / "new" / "small"
    result = call("convert", wide, str(out), "--bits", "4", "--group-size", "32", "--encoder", "minmax", "--measure")
    assert result.out.rstrip("\n").endswith(last)
    assert f"KL {kl:.4f} nats" in result.out
    assert quality.verdict in (out / "README.md").read_text()
    assert json.loads((out / "quantization_report.json").read_text())["quality"]["level"] == quality.level


def test_the_stages_come_one_after_another(call, wide, tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(Stages, "tell", lambda _, stage, done, total, unit: told.append((stage, done, total, unit)))
    result = call("convert", wide, str(tmp_path / "small"), "--bits", "4", "--group-size", "32", "--measure")
    assert result.code == 0
    stages = [stage for stage, _ in groupby(told, key=itemgetter(0))]
    assert stages == ["reading texts, block by block", f"converting {wide}", "measuring the loss before small appears"]
    measured = [each[1:] for each in told if each[0] == stages[-1]]
    assert measured[-1] == (measured[-1][1], measured[-1][1], "positions")
    assert [done for done, *_ in measured] == sorted(done for done, *_ in measured)
    told.clear()
    call("convert", wide, str(tmp_path / "other"), "--bits", "4", "--group-size", "32", "--encoder", "minmax", "--no-measure")
    assert {stage for stage, *_ in told} == {f"converting {wide}"}


def test_without_bits_nothing_is_lost(call, chat_model, tmp_path):
    result = call("convert", chat_model, str(tmp_path / "same"))
    assert "16.00 bits per weight" in result.out
    assert "relative error" not in result.out
    greedy = ("hello", "--temperature", "0", "--max-tokens", "9")
    assert call("run", str(tmp_path / "same"), *greedy).out == call("run", chat_model, *greedy).out


@pytest.mark.parametrize(
    "arguments",
    [
        ["MODEL", "OUT", "--bits", "7"],
        ["MODEL", "OUT", "--bits", "four"],
        ["MODEL", "OUT", "--bits", "4", "--group-size", "33"],
        ["MODEL", "OUT", "--mode", "int4"],
        ["MODEL", "OUT", "--dtype", "float7"],
        ["MODEL", "MODEL", "--bits", "4"],
        ["MODEL", "/proc/none/out", "--bits", "4"],
        ["./none", "OUT", "--bits", "4"],
        ["MODEL"],
        [],
    ],
    ids=" ".join,
)
def test_bad_input_gets_one_line_and_leaves_nothing(call, chat_model, tmp_path, arguments):
    folder = tmp_path / "here"
    folder.mkdir()
    names = {"MODEL": chat_model, "OUT": str(folder / "out")}
    before = sorted(Path(chat_model).iterdir())
    result = call("convert", *(names.get(argument, argument) for argument in arguments))
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert list(folder.iterdir()) == []
    assert sorted(Path(chat_model).iterdir()) == before
