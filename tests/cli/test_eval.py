"""`mlxinfer eval`."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import mlx.core as mx
import pytest
from PIL import Image
from support.models.tiny_directory import tiny_directory

EYES = str(Path(__file__).parents[1] / "golden" / "vision" / "smolvlm")
QUICK = ("--positions", "120", "--window", "40")
FIELDS = {"kl_mean", "kl_stderr", "kl_p99", "kl_max", "top1", "top1_stderr", "ppl", "ppl_stderr", "ppl_ratio", "ppl_ratio_stderr", "bpw"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("pair")
    paths = [tiny_directory(folder / name, eos=False) for name in ("large", "small")]
    weights = mx.load(str(paths[1] / "model.safetensors"))
    mx.save_safetensors(str(paths[1] / "model.safetensors"), {key: w.astype(mx.float16) * 1.01 for key, w in weights.items()})
    return str(paths[0]), str(paths[1])


def test_kl(call, pair):
    result = call("eval", "kl", *pair, *QUICK)
    assert (result.code, result.err) == (0, "")
    assert "KL divergence" in result.out
    assert "nats" in result.out
    found = json.loads(call("eval", "kl", *pair, *QUICK, "--json").out)
    assert found.keys() >= FIELDS
    assert (found["teacher"], found["model"], found["positions"]) == ("large", "small", 120)
    assert found["kl_mean"] > 0
    assert found["text"]["positions"] == 120


def test_an_error_is_told_only_where_it_is_known(call, pair):
    one = call("eval", "kl", *pair, "--positions", "64", "--window", "64").out
    assert "64 positions in 1 window:" in one
    assert "±" not in one
    assert "same top token    1" in one or "same top token    9" in one
    assert "±" in call("eval", "kl", *pair, *QUICK).out
    assert "±" not in call("eval", "compare", *pair, pair[0], "--positions", "64", "--window", "64").out


def test_kl_ends_with_a_verdict(call, pair):
    assert call("eval", "kl", *pair, *QUICK).out.splitlines()[-1].startswith("This model ")
    assert call("eval", "kl", pair[0], pair[0], *QUICK).out.splitlines()[-1] == "This model answers as its source does."


def test_ppl(call, pair, tmp_path):
    (tmp_path / "text.txt").write_text("hello, you " * 30)
    result = call("eval", "ppl", pair[0], *QUICK, "--text", str(tmp_path / "text.txt"))
    assert result.code == 0
    assert "perplexity" in result.out
    found = json.loads(call("eval", "ppl", pair[0], *QUICK, "--json").out)
    assert found["ppl"] > 1
    assert "kl_mean" not in found


def test_compare_tells_neighbours_apart(call, pair):
    result = call("eval", "compare", *pair, pair[0], *QUICK)
    assert result.code == 0
    assert "large against small: KL -" in result.out
    found = json.loads(call("eval", "compare", *pair, "--teacher", pair[0], *QUICK, "--json").out)
    assert [each["model"] for each in found["models"]] == ["large", "small"]
    assert {"kl_mean", "kl_stderr", "top1", "top1_stderr"} <= found["differences"][0].keys()


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed")
@pytest.mark.long
def test_the_picture(call, pair, tmp_path):
    assert call("eval", "compare", *pair, *QUICK, "--picture", str(tmp_path / "a.svg")).code == 0
    assert (tmp_path / "a.svg").read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("compare", "LARGE"), "compare needs two models"),
        (("compare", "LARGE", "SMALL", "--picture", "x.gif"), "no name of a picture"),
        (("kl", "LARGE", "./none"), "no such file"),
        (("kl", "LARGE", "SMALL", "--text", "./none.txt"), "no such file or folder"),
        (("kl", "LARGE", "SMALL", "--dtype", "float7"), "float7"),
        (("kv", "LARGE", "--window", "32", *QUICK[:2]), "page of 64"),
    ],
)
def test_errors_are_one_line(call, pair, arguments, says):
    result = call("eval", *({"LARGE": pair[0], "SMALL": pair[1]}.get(each, each) for each in arguments))
    assert result.code == 2
    assert says in result.err
    assert result.err.count("\n") == 1


def test_a_picture_without_matplotlib(call, pair, monkeypatch):
    monkeypatch.setattr("mlxinfer.evaluation.picture.find_spec", lambda name: None)
    result = call("eval", "compare", *pair, "--picture", "x.svg")
    assert (result.code, "pip install" in result.err) == (2, True)


def test_kv_auto_uses_what_kv_found(call, pair, monkeypatch):
    monkeypatch.setattr("mlxinfer.evaluation.kv.FORMATS", ("8", "2"))
    asked = ("eval", "kv", pair[0], "--positions", "160", "--window", "80", "--no-layers", "--limit", "0.001")
    result = call(*asked)
    assert result.code == 0
    assert result.out.splitlines()[-1].startswith("--kv auto: 8,")
    assert json.loads(call(*asked, "--json").out)["auto"] == "8"
    assert "kv auto: 8, measured" in call("run", pair[0], "hi", "--kv", "auto", "--max-tokens", "2").err
    assert "kv 8" in call("doctor", pair[0], "--kv", "auto").out


def test_an_interrupt_leaves_nothing_behind(call, pair, own_home, monkeypatch):
    monkeypatch.setattr("mlxinfer.evaluation.measure._IN_MEMORY", 0.0)
    monkeypatch.setattr("mlxinfer.evaluation.measure._compare_rows", _interrupted)
    result = call("eval", "kl", *pair, *QUICK)
    assert (result.code, result.out) == (130, "")
    assert not list(own_home.rglob("teacher-*"))


def _interrupted(*_):
    raise KeyboardInterrupt


def test_images(call, tmp_path):
    Image.new("RGB", (30, 20), "red").save(tmp_path / "a.png")
    file = tmp_path / "questions.jsonl"
    file.write_text('{"image": "a.png", "question": "describe the image", "answer": "nothing"}\n' * 3)
    short = ("--max-tokens", "3", "--dtype", "float32")
    shown = call("eval", "images", str(file), EYES, *short, "--answers").out
    assert "3 questions of" in shown
    assert "exact 0.000 ± 0.000" in shown
    assert shown.count("describe the image") == 3
    found = json.loads(call("eval", "images", str(file), EYES, *short, "--json").out)
    assert found["questions"] == len(found["models"][0]["answers"]) == 3
    file.write_text("{}")
    refused = call("eval", "images", str(file), EYES)
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert "line 1 of" in refused.err
