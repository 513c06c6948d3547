"""A Mac without a Metal device, such as a virtual machine: MLX was built with Metal, and its first use of the GPU raises."""

from __future__ import annotations

import subprocess
import sys

import pytest

NOTE = "there is no Metal device (a virtual machine?): models run on the CPU, slowly"

_WITHOUT_DEVICE = """
import mlx.core as mx

chosen, usual, cpu = [mx.Device(mx.gpu, 0)], mx.set_default_device, mx.default_device()

def refuse(*_):
    if chosen[0].type == mx.DeviceType.gpu:
        raise RuntimeError("[metal::load_device] No Metal device available.")
    return info()

info, mx.device_info = mx.device_info, refuse
mx.metal.is_available = lambda: True
mx.default_device = lambda: chosen[0]
mx.set_default_device = lambda device: chosen.__setitem__(0, cpu)
"""


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _WITHOUT_DEVICE + program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_cpu_becomes_the_device() -> None:
    asked = "d.is_gpu(), d.has_metal(), d.device_info(), d.default_dtype(), chosen[0].type"
    done = run(f"from mlxinfer.util import device as d\nprint({asked})")
    assert done.stderr == ""
    assert done.stdout.split() == ["False", "False", "{}", "mlx.core.float32", "DeviceType.cpu"]


def test_doctor_says_so() -> None:
    done = run("import sys\nfrom mlxinfer.cli import main\nmain(sys.argv[1:])", "doctor")
    assert "Traceback" not in done.stderr
    assert done.returncode == 0
    assert NOTE in done.stdout


def test_the_report_says_so() -> None:
    done = run("from mlxinfer.cli.health import diagnosis, report\nprint(*report._machine(diagnosis.diagnose()), sep='\\n')")
    assert done.returncode == 0, done.stderr[-2000:]
    assert NOTE in done.stdout


@pytest.mark.model
def test_a_model_answers_with_a_note() -> None:
    done = run(
        """
from mlxinfer import LLM
with LLM("smollm2", max_context=64) as llm:
    print(llm.notes)
    print(llm.generate("Hi", temperature=0, max_tokens=2)[0].text)
"""
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert NOTE in done.stdout
