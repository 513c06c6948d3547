"""The file of passed trials: what is kept, for whom, and what a broken file costs."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from mlxinfer.cache.attention import prefill_choice
from mlxinfer.errors import UnsupportedShapeError
from mlxinfer.kernels_metal import executors, kept_trials, kernel_trial
from mlxinfer.kernels_metal.kernel_trial import KernelTrial, Speed, Verdict
from mlxinfer.kernels_metal.paged_attention.tiles import Shape

SPEEDS = {1: Speed(1.25), 2: Speed(0.5), 4: Speed(3.0, stalled=True)}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(kept_trials, "trials_file", lambda: tmp_path / "new" / "kernel_trials.json")
    monkeypatch.setattr(executors, "kind", lambda: "Metal")
    monkeypatch.setattr(kernel_trial, "TRIALS", [])
    return tmp_path / "new" / "kernel_trials.json"


class Tried:
    """A kernel of which every new object is that of another process; counts trials by kind."""

    def __init__(self) -> None:
        self.calls: list[object] = []
        self.faults: dict[object, str | Exception] = {}

    def __call__(self, kind: object) -> str | None:
        self.calls.append(kind)
        fault = self.faults.get(kind)
        if isinstance(fault, Exception):
            raise fault
        return fault

    def trial(self, name: str = "sums", speeds: Callable[..., dict[int, Speed]] | None = lambda kind: SPEEDS) -> KernelTrial:
        return KernelTrial(name, self, speeds=speeds)


@pytest.fixture
def tried() -> Tried:
    return Tried()


def test_a_passed_trial_is_not_repeated(file: Path, tried: Tried) -> None:
    kinds = (mx.bfloat16, 48, True), "b"
    first = [tried.trial().try_now(kind) for kind in kinds]
    assert first == [Verdict(speeds={1: Speed(1.25)})] * 2
    assert [tried.trial(speeds=None).try_now(kind) for kind in kinds] == first
    assert tried.trial("products").try_now("b") == first[0]
    assert tried.calls == [*kinds, "b"]
    assert sorted(path.name for path in file.parent.iterdir()) == ["kernel_trials.json", "kernel_trials.json.lock"]


def test_a_speed_that_decides_against_the_kernel_is_kept(file: Path, tried: Tried) -> None:
    for _ in range(2):
        assert tried.trial(speeds=lambda kind: {1: Speed(0.7)}).obstacle("a") == "the kernel has only 0.7x its speed"
    assert tried.calls == ["a"]


def test_a_failed_trial_is_repeated(file: Path, tried: Tried) -> None:
    tried.faults = {"a": "zeros", "b": RuntimeError("Innocent Victim"), "c": UnsupportedShapeError("heads of 64 only")}
    assert all(tried.trial().obstacle(kind) for kind in "abc")
    assert not file.exists()
    tried.faults = {}
    assert not any(tried.trial().obstacle(kind) for kind in "abc")
    assert tried.calls == [*"abcabc"]


def test_a_kernel_that_fails_later_is_tried_again(file: Path, tried: Tried) -> None:
    trial = tried.trial()
    assert trial.lines([("a",), ("b",)]) == []
    assert trial.disable(RuntimeError("fault"), guilty=False, kinds=[("a",)])
    assert trial.obstacle("a") == "a Metal kernel failed: fault"
    assert tried.trial().lines([("a",), ("b",)]) == []
    assert tried.calls == ["a", "b", "a"]


def test_the_doctor_tries_afresh(file: Path, tried: Tried) -> None:
    assert tried.trial().obstacle("a") is None
    with kept_trials.tried_afresh():
        assert tried.trial(speeds=lambda kind: {1: Speed(0.7)}).obstacle("a") == "the kernel has only 0.7x its speed"
    assert tried.trial().obstacle("a") == "the kernel has only 0.7x its speed"
    assert tried.calls == ["a", "a"]


@pytest.mark.parametrize("change", ["device", "system", "mlx", "kernels", "executor", "trial"], ids=lambda change: f"another {change}")
def test_other_conditions_are_tried(file: Path, tried: Tried, monkeypatch: pytest.MonkeyPatch, change: str, tmp_path: Path) -> None:
    kept_trials._machine.cache_clear()
    assert tried.trial().obstacle("a") is None
    with monkeypatch.context() as changed:
        if change == "device":
            changed.setattr(kept_trials, "device_info", lambda: {"device_name": "Apple M9"})
        elif change == "system":
            changed.setattr(kept_trials.platform, "release", lambda: "99.0")
        elif change == "mlx":
            changed.setattr("importlib.metadata.version", lambda name: "9.9")
        elif change == "executor":
            changed.setattr(executors, "kind", lambda: "CUDA")
        elif change == "kernels":
            changed.setattr(kept_trials, "_digest", lambda files: "other")
        else:
            changed.setattr(kept_trials, "_digest_of_trial", lambda check: "other")
        if change not in ("trial", "executor"):
            kept_trials._machine.cache_clear()
        assert tried.trial().obstacle("a") is None
    kept_trials._machine.cache_clear()
    assert tried.calls == ["a", "a"]


def test_the_code_of_a_trial_and_its_kernels_counts(tmp_path: Path) -> None:
    (tmp_path / "kernel.metal").write_text("a")
    (tmp_path / "notes.md").write_text("a")
    digests = [kept_trials._digest(tmp_path.iterdir())]
    (tmp_path / "notes.md").write_text("b")
    digests.append(kept_trials._digest(tmp_path.iterdir()))
    (tmp_path / "kernel.metal").write_text("b")
    digests.append(kept_trials._digest(tmp_path.iterdir()))
    (tmp_path / "launcher.py").write_text("a")
    digests.append(kept_trials._digest(tmp_path.iterdir()))
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3
    assert kept_trials._digest_of_trial(prefill_choice.TRIAL._check) == kept_trials._digest(Path(prefill_choice.__file__).parent.iterdir())


def test_nothing_is_kept_of_another_executor(file: Path, tried: Tried, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one of a test, whose kernels are wrong."""
    monkeypatch.undo()
    monkeypatch.setattr(kept_trials, "trials_file", lambda: file)
    monkeypatch.setattr(kernel_trial, "TRIALS", [])
    with executors.run_with(lambda **_: None):  # type: ignore[arg-type, return-value]
        assert executors.kind() == ""
        assert tried.trial().obstacle("a") is None
    assert not file.exists()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\x00", b"[" * 100_000, b'{"machine": 3, "trials": {}}', b"null"])
def test_a_broken_file_is_as_good_as_none(file: Path, tried: Tried, content: bytes) -> None:
    file.parent.mkdir()
    file.write_bytes(content)
    assert tried.trial().obstacle("a") is None
    assert tried.trial().obstacle("a") is None
    assert tried.calls == ["a"]
    assert json.loads(file.read_text())["machine"] == kept_trials.machine()


@pytest.mark.parametrize(
    "entry", [None, 3, [], {}, {"speeds": 1}, {"speeds": {"1": 2}}, {"speeds": {"x": [1, False, True]}}, {"speeds": {"1": ["x", 0, 0]}}]
)
def test_a_broken_entry_is_as_good_as_none(file: Path, tried: Tried, entry: object) -> None:
    assert tried.trial().obstacle("a") is None
    content = json.loads(file.read_text())
    content["trials"]["sums"]["kinds"] = {"('a',)": entry}
    file.write_text(json.dumps(content))
    assert tried.trial().obstacle("a") is None
    assert tried.calls == ["a", "a"]


@pytest.mark.parametrize("trials", [3, [], {"sums": 3}, {"sums": {"source": ""}}, {"sums": {"source": "", "kinds": []}}])
def test_a_file_of_another_form_is_as_good_as_none(file: Path, tried: Tried, trials: object) -> None:
    file.parent.mkdir()
    file.write_text(json.dumps({"machine": kept_trials.machine(), "trials": trials}))
    assert [tried.trial().obstacle("a") for _ in range(2)] == [None] * 2
    assert tried.calls == ["a"]


def test_a_folder_that_cannot_be_written_is_no_fault(file: Path, tried: Tried) -> None:
    file.parent.write_text("a file")
    assert [tried.trial().obstacle("a") for _ in range(2)] == [None] * 2
    assert tried.calls == ["a", "a"]


def test_a_file_that_cannot_be_replaced_is_no_fault(file: Path, tried: Tried) -> None:
    file.mkdir(parents=True)
    assert tried.trial().obstacle("a") is None
    os.mkfifo(file.parent / "pipe")
    file.rmdir()
    (file.parent / "pipe").rename(file)  # reading it would block
    assert tried.trial().obstacle("a") is None


PROCESS = """
import sys
from pathlib import Path
from mlxinfer.kernels_metal import executors, kept_trials
executors.kind = lambda: "Metal"
kept_trials.trials_file = lambda: Path(sys.argv[1])
kept_trials._LOCK_TRIES = 10_000  # a busy machine suspends processes that hold the lock
print("ready", flush=True)
sys.stdin.readline()
for number in range(15):
    kept_trials.keep(f"trial {number % 2}", print, (sys.argv[2], number), {"speeds": {}})
"""


def test_parallel_processes_lose_no_entries(file: Path) -> None:
    started = [
        subprocess.Popen([sys.executable, "-c", PROCESS, str(file), name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for name in "abc"
    ]
    for process in started:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
    for process in started:
        assert process.stdin
        process.stdin.close()
    for process in started:
        assert process.wait(timeout=60) == 0
        assert process.stdout
        process.stdout.close()
    trials = json.loads(file.read_text())["trials"]
    found = {kind for trial in trials.values() for kind in trial["kinds"]}
    assert found == {repr((name, number)) for name in "abc" for number in range(15)}


def test_a_lock_that_is_never_freed_is_not_awaited(file: Path, tried: Tried, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one of a suspended process."""
    paused: list[float] = []
    monkeypatch.setattr(kept_trials.time, "sleep", paused.append)
    file.parent.mkdir()
    with (file.parent / "kernel_trials.json.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert tried.trial().obstacle("a") is None
    assert sum(paused) <= 1
    assert tried.trial().obstacle("a") is None
    assert tried.calls == ["a"]


def test_threads_lose_no_entries(file: Path) -> None:
    threads = [threading.Thread(target=kept_trials.keep, args=("sums", print, number, {"speeds": {}})) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(json.loads(file.read_text())["trials"]["sums"]["kinds"]) == 12


def test_the_choice_for_prompts_is_kept(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    times = {"kernel": 2.0, "mlx": 1.0}
    monkeypatch.setattr(prefill_choice, "has_metal", lambda: True)
    monkeypatch.setattr(prefill_choice, "_by_kernel", lambda shape: "kernel")
    monkeypatch.setattr(prefill_choice, "_by_mlx", lambda shape: "mlx")
    monkeypatch.setattr(prefill_choice, "_seconds", lambda way: (asked.append(way), times[way])[1])
    shape = Shape(mx.bfloat16, 8, 2, 128, 128, 4, 4)
    prefill_choice.TRIAL.forget()
    try:
        for _ in range(2):
            prefill_choice.TRIAL.forget()
            assert prefill_choice.unsealing_is_faster(shape)
        assert asked.count("kernel") == 3
        times["kernel"] = 0.5
        assert not prefill_choice.unsealing_is_faster(Shape(mx.float16, 8, 2, 128, 128, 4, 4))
    finally:
        prefill_choice.TRIAL.forget()


@pytest.fixture
def pmset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str, str], None]:
    """Put a stub of `pmset` into PATH: it tells the power source and the low power mode that are set."""

    def put(source: str, low: str = "0") -> None:
        (tmp_path / "batt").write_text(f"Now drawing from '{source}'\n")
        (tmp_path / "settings").write_text(f"Currently in use:\n lowpowermode {low}\n")
        kernel_trial._power_now.cache_clear()  # as in another process

    stub = tmp_path / "pmset"
    stub.write_text(f'#!/bin/sh\necho >> "{tmp_path}/asked"; cat "{tmp_path}/${{2:-settings}}"\n')
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(sys, "platform", "darwin")
    put("AC Power")
    return put


@pytest.mark.parametrize(("slow", "text"), [(("Battery Power", "0"), "battery"), (("AC Power", "1"), "mains, low power mode")])
def test_a_speed_measured_with_little_power_is_measured_again_with_more(
    file: Path, tried: Tried, pmset: Callable[..., None], slow: tuple[str, str], text: str
) -> None:
    pmset(*slow)
    trial = tried.trial(speeds=lambda kind: {1: Speed(0.9)})
    assert trial.obstacle("a") == "the kernel has only 0.9x its speed"
    assert trial.described() == [f"sums: plain MLX instead: the kernel has only 0.9x its speed (measured on {text})"]
    pmset(*slow)
    again = tried.trial()
    assert again.obstacle("a") == "the kernel has only 0.9x its speed"
    assert again.described() == trial.described()
    assert tried.calls == ["a"]
    pmset("AC Power")
    for _ in range(2):
        trial = tried.trial()
        assert trial.try_now("a").speeds == {1: Speed(1.25)}
        pmset(*slow)
        assert not trial.verdicts["a",].power
    assert tried.calls == ["a", "a"]


def test_power_is_asked_for_only_if_it_matters(file: Path, tried: Tried, pmset: Callable[..., None], tmp_path: Path) -> None:
    assert tried.trial(speeds=None).obstacle("not measured") is None
    assert not (tmp_path / "asked").exists()
    assert tried.trial().obstacle("measured") is None
    asked = (tmp_path / "asked").read_text()
    assert tried.trial().obstacle("measured") is None
    assert (tmp_path / "asked").read_text() == asked


def test_noise_changes_no_choice(file: Path, tried: Tried) -> None:
    def measured_again(times: float) -> bool:
        with kept_trials.tried_afresh():
            return tried.trial(speeds=lambda kind: {1: Speed(times)}).obstacle("a") is None

    steps = (1.0, 1.02, 1.03, 1.0, 0.98, 0.96, 1.0, 1.02, 1.04)
    assert [measured_again(times) for times in steps] == [False, False, True, True, True, False, False, False, True]
    assert tried.trial().obstacle("a") is None
