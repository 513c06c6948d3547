from __future__ import annotations

import io
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxinfer.cli.common.answer_json import as_object
from mlxinfer.cli.common.console import byte_bar, did_you_mean, experts_line, human_bytes, printable, usage_line, wrapped
from mlxinfer.kernels_metal import kernel_trial
from mlxinfer.types import Completion, EngineStats, RequestStats, Usage


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (98_362_432, "98.4 MB"),
        (253_113_024, "253 MB"),
        (999_600, "1.0 MB"),
        (2e15, "2000 TB"),
    ],
)
def test_human_bytes(count, text):
    assert human_bytes(count) == text


@given(st.text())
def test_no_control_character_reaches_the_terminal(text):
    assert not set(printable(text)) & {chr(i) for i in [*range(32), *range(127, 160)] if chr(i) not in "\n\t"}
    assert printable(text) == text or not text.isprintable()


def test_usage_line_leaves_out_what_is_not_known():
    assert usage_line(Usage(3, 1, ttft_s=0.5)) == "read 3 tokens · wrote 1 token · first token after 0.50 s"
    line = usage_line(Usage(3, 20, 0.5, 6.0, 5.26, 812_000_000))
    assert line == "read 3 tokens · wrote 20 tokens · first token after 0.50 s · prefill 6.0 tok/s · decode 5.3 tok/s · peak 812 MB"


def test_usage_line_tells_what_was_reused_and_drafted():
    stats = RequestStats(reused_tokens=1500, drafted_tokens=20, accepted_tokens=15)
    line = usage_line(Usage(1532, 3, ttft_s=0.5, stats=stats))
    assert line == ("read 1532 tokens (1500 cached) · wrote 3 tokens · first token after 0.50 s · 15 of 20 drafted tokens accepted")


def test_lines_of_the_interface_break_between_words():
    assert wrapped("read 3 tokens · wrote 20 tokens", 20) == "read 3 tokens ·\nwrote 20 tokens"
    assert wrapped("/trim [N]  drop the oldest messages", 30) == "/trim [N]  drop the oldest\n           messages"
    assert wrapped("a\n\nb", 20) == "a\n\nb"


@pytest.mark.parametrize(
    ("typed", "meant"), [("rnu", " (did you mean run?)"), ("RUN", " (did you mean run?)"), ("xyz", ""), ("con", " (did you mean convert?)")]
)
def test_did_you_mean(typed, meant):
    assert did_you_mean(typed, ["run", "convert"]) == meant


@pytest.mark.parametrize("terminal", [True, False])
def test_the_first_start_says_that_kernels_are_compiled(monkeypatch, terminal):
    screen = io.StringIO()
    screen.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    notice = kernel_trial._Notice()
    monkeypatch.setattr(kernel_trial, "_NOTICE", notice)
    for _ in range(2):
        with byte_bar("loading"):
            notice._due()
    notice._due()
    assert screen.getvalue().count("compiling kernels (once)") == terminal


READS = EngineStats(
    prompt_tokens=12,
    reused_tokens=4,
    completion_tokens=12,
    expert_bytes_read=40_000_000,
    expert_hits=300,
    expert_misses=100,
    expert_wait_s=0.05,
    experts=64,
    expert_slots=24,
)


def test_reads_of_experts_are_one_line():
    assert experts_line(READS) == (
        "experts: 24 of 64 in memory, 75% of chosen ones · 40.0 MB read, 2.0 MB a token · waited 0.05 s, 2.5 ms a token"
    )
    assert experts_line(EngineStats(prompt_tokens=5)) == ""


def test_reads_of_experts_are_part_of_an_answer_as_an_object():
    answer = Completion("text", [1], "stop", Usage(12, 12))
    found = as_object([answer], READS)["experts"]
    assert found["bytes_read_per_token"] == 2_000_000
    assert (found["hits"], found["misses"], found["slots"], found["experts"]) == (300, 100, 24, 64)
    assert found["waiting_s_per_token"] == pytest.approx(0.0025)
    assert "experts" not in as_object([answer], EngineStats())
