"""The steps of the report, in the order in which they run."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from .running import ROOT, Step

INSTALL = "install, first start"
_MODEL = "fetch the model"
_CONVERT = "convert SmolLM2"
_MINUTE = 60.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Settings of a report."""

    environment: Path = ROOT / ".venv"
    """The virtual environment that `make` creates."""
    small: str = "smollm2"
    """Model of the steps that any Mac can run."""
    model: str = "mlx-community/Llama-3.2-3B-Instruct-4bit"
    """Model of the comparison with mlx-lm, 1.8 GB."""
    work: Path = ROOT / "build" / "mac-report"
    """Folder for what the steps write."""
    quick: bool = False
    """Run everything with a few tokens, to try the report itself."""

    @property
    def python(self) -> str:
        return str(self.environment / "bin" / "python")

    def make(self, *arguments: str) -> tuple[str, ...]:
        return ("make", *arguments, f"VENV={self.environment}", f"PYTHON={sys.executable}")

    def mlxinfer(self, *arguments: str) -> tuple[str, ...]:
        return (self.python, "-m", "mlxinfer", *arguments)

    def study(self, *arguments: str) -> tuple[str, ...]:
        return (self.python, "-m", "benchmarks", *arguments)

    def module(self, name: str, *arguments: str) -> tuple[str, ...]:
        return (self.python, "-m", f"benchmarks.mac_report.{name}", *arguments)


def steps(plan: Plan) -> list[Step]:
    """Return all steps. `make demo` installs what the others need."""
    return [*_machine(), *_installation(plan), *_kernels(plan), *_speeds(plan), *_checks(plan), *_state("after")]


def _machine() -> list[Step]:
    commands = {
        "commit": "git log -1 --format=%H%n%cs",
        "changed files": "git status --short --untracked-files=no",
        "macOS": "sw_vers",
        "chip": "sysctl -n machdep.cpu.brand_string hw.memsize hw.ncpu hw.perflevel0.physicalcpu",
        "system": "uname -srm",
        "developer tools": "xcode-select -p",
        "power mode": "pmset -g",
    }
    return [*(Step(title, tuple(command.split()), 20) for title, command in commands.items()), *_state("before")]


def _state(when: str) -> list[Step]:
    """Return steps about power and heat, which decide how much a measurement is worth."""
    commands = {"power": "pmset -g batt", "heat": "pmset -g therm", "load": "uptime"}
    return [Step(f"{title} {when}", tuple(command.split()), 20) for title, command in commands.items()]


def _installation(plan: Plan) -> list[Step]:
    short = ("run", plan.small, "Hello", "--max-tokens", "8", "--temperature", "0")
    return [
        Step(INSTALL, plan.make("demo"), 15 * _MINUTE),
        Step("second start", plan.mlxinfer(*short), 2 * _MINUTE, needs=INSTALL),
        Step("third start", plan.mlxinfer(*short), 2 * _MINUTE, needs=INSTALL),
        Step("wheels", plan.module("wheels"), _MINUTE, needs=INSTALL),
        Step(
            "doctor",
            plan.mlxinfer("doctor", plan.small, "--report", str(plan.work / "doctor.md")),
            5 * _MINUTE,
            needs=INSTALL,
            file=plan.work / "doctor.md",
        ),
    ]


def _kernels(plan: Plan) -> list[Step]:
    """Return steps about what Apple's compiler takes, and whether it computes the right numbers."""
    few = ("--model", "smollm2", "--kv", "16") if plan.quick else ()
    tests = "-q tests/kernels_metal/test_add_norm.py" if plan.quick else "-q --timeout 300"
    return [
        Step("kernels compiled", plan.study("kernels-compile", *few), 10 * _MINUTE, needs=INSTALL),
        Step("kernels against float64", plan.make("kernels", f"ARGS={tests}"), 15 * _MINUTE, needs=INSTALL),
        Step(
            "long answers",
            plan.module("answers", plan.small, *(("--tokens", "4") if plan.quick else ())),
            6 * _MINUTE,
            needs=INSTALL,
        ),
    ]


def _speeds(plan: Plan) -> list[Step]:
    converted = str(plan.work / "smollm2-4bit")
    few = ("--rounds", "1", "--prompt", "16", "--tokens", "4") if plan.quick else ()
    small = (*few, "--streams", "1") if plan.quick else ()
    one = ("--streams", "1", *(few or ("--rounds", "2", "--tokens", "64")))
    ops = [f"MLX_MAX_OPS_PER_BUFFER={count}" for count in (500, 1000, 40)]  # of mlxinfer on M1 to M4, more, and of MLX
    replay = [f"MLXINFER_COMPILED_STEPS={on}" for on in (1, 0)]
    return [
        Step("attention", plan.study("attention-gpu"), 6 * _MINUTE, needs=INSTALL),
        Step("products", plan.study("products-gpu"), 3 * _MINUTE, needs=INSTALL),
        Step("SmolLM2", plan.mlxinfer("bench", plan.small, *_bench(plan)), 3 * _MINUTE, needs=INSTALL),
        Step(_CONVERT, plan.mlxinfer("convert", plan.small, converted, "--bits", "4", "--encoder", "minmax"), 3 * _MINUTE, needs=INSTALL),
        Step("SmolLM2 beside mlx-lm", plan.module("turns", "mlx-lm", converted, *small), 5 * _MINUTE, needs=_CONVERT),
        Step(_MODEL, plan.mlxinfer("run", plan.model, "Hello", "--max-tokens", "8"), 15 * _MINUTE, needs=INSTALL),
        Step("beside mlx-lm", plan.module("turns", "mlx-lm", plan.model, *few), 15 * _MINUTE, needs=_MODEL),
        Step("steps built and replayed", plan.module("turns", "variables", plan.small, *replay, *one), 3 * _MINUTE, needs=INSTALL),
        Step("operations per buffer", plan.module("turns", "variables", plan.model, *ops, *one), 5 * _MINUTE, needs=_MODEL),
    ]


def _bench(plan: Plan) -> tuple[str, ...]:
    return ("--prefill", "16", "--decode-depth", "0", "--batch", "1", "--steps", "4", "--repeat", "1") if plan.quick else ()


def _checks(plan: Plan) -> list[Step]:
    """Return steps with Metal's own checks of what a kernel reads and writes."""
    run = plan.mlxinfer("run", plan.small, "Hello", "--max-tokens", "4" if plan.quick else "100", "--kv", "4", "--temperature", "0")
    return [
        Step("Metal's checks of calls", run, 3 * _MINUTE, {"MTL_DEBUG_LAYER": "1"}, INSTALL),
        Step("Metal's checks of kernels", run, 3 * _MINUTE, {"MTL_SHADER_VALIDATION": "1"}, INSTALL),
    ]
