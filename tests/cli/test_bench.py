from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pexpect
import pytest
from support.models.tiny_directory import tiny_directory

from mlxinfer.util.device import default_dtype

QUICK = ("--prefill", "7,40", "--decode-depth", "0,70", "--batch", "1,2", "--repeat", "2", "--steps", "5")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_directory(tmp_path_factory.mktemp("models") / "tiny", rounded=True))


@pytest.mark.long
def test_json(call, tiny):
    result = call("bench", tiny, "--json", *QUICK)
    assert (result.code, result.err) == (0, "")
    found = json.loads(result.out)
    numbers = {"weight_bytes", "load_s", "first_token_s", "peak_rss_bytes"}
    assert set(found) == numbers | {"model", "dtype", "kv", "rows", "machine", "versions"}
    assert all(found[name] > 0 for name in numbers)
    assert (found["model"], found["dtype"]) == ("tiny", str(default_dtype()).removeprefix("mlx.core."))
    assert found["first_token_s"] > found["load_s"]
    assert {"device", "threads", "read_bytes", "copy_bytes", "operations"} <= set(found["machine"])
    assert [(r["work"], r["depth"], r["batch"]) for r in found["rows"]] == [
        ("prefill", 0, 1), ("prefill", 0, 1), ("decode", 0, 1), ("decode", 0, 2), ("decode", 70, 1), ("decode", 70, 2),
    ]  # fmt: skip
    for row in found["rows"]:
        speeds = row["tokens_per_s"]
        assert len(row["rates"]) == 2
        assert 0 < speeds["lowest"] <= speeds["median"] <= speeds["highest"]
        assert row["seconds"] == pytest.approx((row["batch"] if row["work"] == "decode" else row["tokens"]) / speeds["median"])
        assert row["shares"]["bandwidth"] == pytest.approx(row["cost"]["bytes"] / row["seconds"] / found["machine"]["read_bytes"])
        assert row["shares"]["operations"] == pytest.approx(row["cost"]["operations"] / row["seconds"] / found["machine"]["operations"])


@pytest.mark.long
def test_the_table_fits_a_terminal_and_says_what_is_left_out(call, tiny):
    result = call("bench", tiny, *QUICK, "--prefill", "40,1000")
    lines = result.out.splitlines()
    assert result.code == 0
    assert [line.split()[:2] for line in lines if line.lstrip().startswith("decode")] == [["decode", d] for d in ("0", "0", "70", "70")]
    assert "prefill 1000: left out, does not fit in the context of 256 tokens" in lines
    assert max(map(len, lines[3:])) <= 80


@pytest.mark.long
def test_nothing_to_measure_but_loading(call, tiny):
    found = json.loads(call("bench", tiny, "--json", "--prefill", "none", "--batch", "none").out)
    assert found["rows"] == []
    assert "loaded in" in call("bench", tiny, "--prefill", "none", "--batch", "none").out


@pytest.mark.long
def test_the_smallest_context_leaves_everything_out(call, tiny):
    found = json.loads(call("bench", tiny, "--json", "--max-context", "1").out)
    assert {row["left_out"] for row in found["rows"]} == {"does not fit in the context of 1 tokens"}


def test_settings_reach_the_model(call, tiny):
    found = json.loads(call("bench", tiny, "--json", "--dtype", "bfloat16", "--prefill", "8", "--batch", "none").out)
    assert found["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--prefill", "0"],
        ["--prefill", "a"],
        ["--prefill", ""],
        ["--prefill", "1,,2"],
        ["--prefill", "9" * 5000],
        ["--batch", "0"],
        ["--batch", "-1"],
        ["--decode-depth", "1.5"],
        ["--repeat", "0"],
        ["--steps", "0"],
        ["--max-seconds", "-1"],
        ["--max-seconds", "nan"],
        ["--kv", "7"],
        ["--bits", "7"],
        ["--dtype", "float7"],
        ["--max-context", "0"],
        ["extra"],
    ],
    ids=lambda arguments: " ".join(arguments)[:30],
)
def test_bad_input_gets_one_line_and_exit_code_2(call, tiny, arguments):
    result = call("bench", tiny, *arguments)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert result.err.startswith("mlxinfer: ")


def test_a_missing_model(call):
    assert call("bench", "./nothing").code == 2


@pytest.mark.long
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_leave_what_is_done_on_a_terminal(sent, code, tmp_path: Path):
    path = str(tiny_directory(tmp_path / "long", context=100_000, rounded=True))
    endless = ["-m", "mlxinfer", "bench", path, "--prefill", "16,90000", "--max-seconds", "0"]
    child = pexpect.spawn(sys.executable, endless, env=os.environ | {"TERM": "xterm"}, encoding="utf-8", dimensions=(24, 100), timeout=60)
    child.expect(r"prefill 16: [0-9.]+ tok/s")
    child.expect("prefill 90000: 1 of 5")
    child.kill(sent)
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == code
    assert "Traceback" not in child.before


def test_shares_above_one_are_explained():
    from mlxinfer.cli.bench import _legend

    def found(bandwidth: float, operations: float) -> dict[str, object]:
        rows = [{"shares": {"bandwidth": bandwidth, "operations": operations}}, {"shares": None}]
        return {"rows": rows, "machine": {"operations_dtype": "float32"}}

    assert len(_legend(found(0.9, 0.9))) == 2
    assert "integers" in _legend(found(0.9, 2.06))[2]
    assert "cache" in _legend(found(1.2, 0.9))[2]
