"""Comparisons with real worker processes and fake engines."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.common import system
from benchmarks.common.process import Process, WorkerError
from benchmarks.common.samples import Sample
from benchmarks.compare.comparison import Comparison, Settings
from benchmarks.compare.workloads import Work, context_of, works

FAKE = Path(__file__).parents[1] / "support" / "http" / "fake_worker.py"
WORKS = (
    Work("decode at 0", "decode", depth=0, steps=8),
    Work("decode at 0, 8 together", "decode", depth=0, streams=8, steps=8),
    Work("prefill 512", "prefill", tokens=512),
)
SETTINGS = Settings(("mlxinfer", "llama.cpp", "mlx-lm"), WORKS, rounds=3, threads=1, limits={"mlx-lm": 100}, start=False)


def fake(engine: str, threads: int, **options: float) -> Process:
    return Process(engine, threads, command=[sys.executable, str(FAKE), engine], **options)


def comparison(directory: Path, settings: Settings = SETTINGS) -> Comparison:
    """A comparison of a model in a directory, which needs no conversion."""
    (directory / "weights").write_bytes(bytes(1000))
    return Comparison("tiny", directory, settings, lambda text: None, fake)


def test_every_round_has_every_engine_and_another_order(tmp_path: Path) -> None:
    samples = list(comparison(tmp_path).run())
    for number in (1, 2, 3):
        for work in WORKS:
            engines = [s.engine for s in samples if s.round == number and s.work == work.name]
            assert set(engines) == {"mlxinfer", "llama.cpp", "mlx-lm"} - ({"mlx-lm"} if work.streams > 1 else set())
    firsts = [next(s.engine for s in samples if s.round == number and s.work == "prefill 512") for number in (1, 2, 3)]
    assert set(firsts) == {"mlxinfer", "llama.cpp", "mlx-lm"}
    assert {s.work for s in samples if s.engine == "machine"} == {"read", "copy", "multiply-add"}


def test_rates_lengths_and_costs(tmp_path: Path) -> None:
    samples = list(comparison(tmp_path, replace(SETTINGS, rounds=1)).run())
    found = {(s.work, s.engine): s for s in samples}
    assert found["decode at 0", "llama.cpp"].value == pytest.approx(100)
    assert found["decode at 0, 8 together", "mlxinfer"].value == pytest.approx(1600)
    assert found["prefill 512", "mlxinfer"].value == pytest.approx(200)
    assert (found["prefill 512", "mlxinfer"].length, found["prefill 512", "mlx-lm"].length) == (512, 100)
    assert found["prefill 512", "mlx-lm"].operations == 1e8
    # In the middle of eight steps there are four tokens in the cache; a cached number takes four bytes in one engine, two in the other.
    assert found["decode at 0", "mlxinfer"].bytes == 1000 + 8 * 4
    assert found["decode at 0", "llama.cpp"].bytes == 1000 + 8 * 4 / 2
    assert all(s.idle_cpu_s < 1 for s in samples)


def test_whole_processes_give_time_and_memory(tmp_path: Path) -> None:
    settings = Settings(("llama.cpp",), (), rounds=2, threads=1, start=True)
    samples = [s for s in comparison(tmp_path, settings).run() if s.unit in ("s", "bytes")]
    assert [s.work for s in samples] == ["load to first token", "first load to first token", "peak memory"] * 2
    assert samples[0].value == samples[1].value
    assert all(0.001 < s.value < 60 for s in samples if s.unit == "s")
    assert all(2**20 < s.value < 2**33 for s in samples if s.unit == "bytes")


def test_a_first_load_of_ours_is_a_separate_process(tmp_path: Path) -> None:
    settings = Settings(("mlxinfer",), WORKS[:1], rounds=1, threads=1, start=True)
    samples = [s for s in comparison(tmp_path, settings).run() if s.unit == "s"]
    assert [(s.work, s.engine) for s in samples] == [("first load to first token", "mlxinfer"), ("load to first token", "mlxinfer")]
    assert samples[0].value != samples[1].value


def test_an_engine_that_is_not_installed_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_MISSING", "llama.cpp")
    measured = comparison(tmp_path, replace(SETTINGS, rounds=1))
    assert "llama.cpp" not in {s.engine for s in measured.run()}
    assert measured.left_out == {"llama.cpp": "llama.cpp: ImportError: No module named 'llama_cpp'"}
    assert set(measured.about) == {"mlxinfer", "mlx-lm"}
    with pytest.raises(WorkerError, match="No module named 'llama_cpp'"):
        list(comparison(tmp_path, replace(SETTINGS, engines=("llama.cpp",))).run())


def test_an_engine_that_crashes_ends_the_run_with_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CRASH", "llama.cpp")
    kept: list[Sample] = []
    with pytest.raises(WorkerError, match=r"^llama.cpp: its process ended with 3: free\(\): invalid pointer$"):
        collect(comparison(tmp_path), kept)
    assert {s.work for s in kept} >= {"read", "decode at 0"}


def collect(measured: Comparison, kept: list[Sample]) -> None:
    for sample in measured.run():
        kept.append(sample)


def test_without_ours_there_are_no_costs(tmp_path: Path) -> None:
    samples = list(comparison(tmp_path, replace(SETTINGS, engines=("llama.cpp",), rounds=1)).run())
    assert {s.bytes for s in samples} == {0.0}


def test_all_workers_have_the_same_threads_and_the_switch_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLXINFER_CPU_KERNELS", raising=False)
    script = "import json, os, sys; sys.stdin.readline(); print(json.dumps(dict(os.environ)), flush=True)"
    for engine in ("llama.cpp", "mlxinfer-plain"):
        with Process(engine, 3, command=[sys.executable, "-c", script]) as process:
            variables = process.ask("environment")
        assert {variables[name] for name in ("MLXINFER_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")} == {"3"}
        assert (variables.get("MLXINFER_CPU_KERNELS") == "0") == (engine == "mlxinfer-plain")


def test_a_silent_worker_is_an_error() -> None:
    silent = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with Process("silent", 1, command=silent, patience_s=0.2) as process, pytest.raises(WorkerError, match="silent: no answer in 0 s"):
        process.ask("load")


def test_no_worker_outlives_its_run(tmp_path: Path) -> None:
    def children() -> set[str]:
        return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()) if sys.platform == "linux" else set()

    before = children()
    run = comparison(tmp_path).run()
    next(run)
    assert children() > before or sys.platform != "linux"
    run.close()
    assert children() <= before


def test_children_of_a_worker_end_with_it() -> None:
    script = """
import json, subprocess, sys
sys.stdin.readline()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdin=subprocess.PIPE, stdout=sys.stdout)
print(json.dumps({"pid": child.pid}), flush=True)
sys.stdin.read()
"""
    with Process("parent", 1, command=[sys.executable, "-c", script]) as process:
        pid = process.ask("start")["pid"]
        os.kill(pid, 0)
    # It also had the worker's output, which is closed by now. It has ended, or is ending and does not sleep.
    status = Path(f"/proc/{pid}/stat")
    assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "S"


def test_unknown_jobs_and_bad_ones_are_errors() -> None:
    with fake("mlx-lm", 1) as worker:
        with pytest.raises(WorkerError, match="no such job"):
            worker.ask("dance")
        with pytest.raises(WorkerError, match="TypeError"):
            worker.ask("prefill", speed=3)
        assert worker.ask("prefill", tokens=20)["seconds"] == 2


def test_answers_have_the_time_of_the_worker_and_of_others() -> None:
    with fake("mlx-lm", 1) as worker:
        first = worker.ask("load", model="", threads=1, context=1, prompt="")
        second = worker.ask("prefill", tokens=20)
    assert first["cpu_s"] > second["cpu_s"] >= 0
    assert first["idle_cpu_s"] == 0
    assert all(0 <= answer["others"] <= 1 for answer in (first, second))


def test_others_are_busy_processors_without_the_measured_process(monkeypatch: pytest.MonkeyPatch) -> None:
    busy, clock = iter([100.0, 106.0, 106.0, 106.0]), iter([10.0, 12.0, 20.0, 30.0])
    monkeypatch.setattr(system, "_busy_seconds", lambda: next(busy))
    monkeypatch.setattr(system, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(system.os, "cpu_count", lambda: 4)
    assert system.Window().others(own=2.0) == (6.0 - 2.0) / (2.0 * 4)
    assert system.Window().others(own=2.0) == 0.0


@pytest.mark.skipif(not system._busy_seconds(), reason="this system does not report its processor time")
def test_the_system_counts_busy_processors() -> None:
    before, own = system._busy_seconds(), time.process_time()
    while time.process_time() < own + 0.1:
        pass
    assert system._busy_seconds() - before >= 0.05


def test_limits_and_context() -> None:
    work = Work("x", "decode", depth=1024, steps=64)
    assert work.limited(None) == work
    assert work.limited(100).depth == 100
    assert work.limited(5000).depth == 1024
    assert context_of(works(64)) >= 2048 + 1
