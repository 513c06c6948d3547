"""Parts of a release: formula and lock, workflow, root manifest, version, requirements of the wheels."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from mlxinfer._version import __version__

ROOT = Path(__file__).parents[2]
HOMEBREW = ROOT / "packaging" / "homebrew"
LIBRARIES = ["MLXInferClient", "MLXInferFoundationModels"]
"""Products of the Swift package."""
RELEASE = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", HOMEBREW / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def lock() -> dict[str, Any]:
    return json.loads((HOMEBREW / "lock.json").read_text(encoding="utf-8"))


def test_formula_is_what_the_lock_gives(generate: ModuleType, lock: dict[str, Any]) -> None:
    text = (HOMEBREW / "mlxinfer.rb").read_text(encoding="utf-8")
    assert text == generate.formula(lock), "run: python packaging/homebrew/generate.py formula"
    resources = re.findall(r'resource "(.+)" do\n    url "(.+)", using: :nounzip\n    sha256 "([0-9a-f]{64})"\n', text)
    assert resources == [(package["name"], package["url"], package["sha256"]) for package in lock["packages"]]
    assert text.count("\n  resource ") == len(resources)


def test_everything_locked_is_a_wheel_for_a_mac(lock: dict[str, Any]) -> None:
    tags = re.compile(r"-(py3|py2\.py3|cp313|cp3\d+)-(none|abi3|cp313)-(any|macosx_(10|11|12|13|14)_\d+_(arm64|universal2))\.whl$")
    for package in lock["packages"]:
        address = package["url"]
        assert address.startswith("https://files.pythonhosted.org/packages/"), address
        assert tags.search(address), address
        assert f"/{package['name'].replace('-', '_')}-{package['version']}-" in address.lower()


def _direct_dependencies() -> set[str]:
    section = re.search(r"^dependencies = \[\n(.*?)^\]", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert section is not None
    lines = [line for line in section[1].splitlines() if "'linux'" not in line]
    return set(re.findall(r'^    "([a-z0-9-]+)', "\n".join(lines), re.MULTILINE))


def test_every_dependency_is_locked(lock: dict[str, Any]) -> None:
    needed = _direct_dependencies()
    assert {"mlx", "tokenizers", "llguidance"} <= needed
    assert needed <= {package["name"] for package in lock["packages"]}
    assert "mlx-metal" in {package["name"] for package in lock["packages"]}, "what MLX computes with on a Mac"
    assert "mlx-cpu" not in {package["name"] for package in lock["packages"]}, "resolved for Linux"


def test_formula_of_a_release_names_the_wheel(generate: ModuleType, lock: dict[str, Any], tmp_path: Path) -> None:
    wheel = tmp_path / f"mlxinfer-{__version__}-py3-none-any.whl"
    wheel.write_bytes(b"what is in it")
    text = generate.formula({**lock, "release": generate.released(wheel)})
    assert f'  url "https://files.pythonhosted.org/packages/py3/m/mlxinfer/{wheel.name}", using: :nounzip\n' in text
    assert f'  sha256 "{hashlib.sha256(wheel.read_bytes()).hexdigest()}"\n' in text
    assert "Not released" not in text
    assert "0" * 64 not in text


def test_a_package_without_a_wheel_for_macs_is_refused(generate: ModuleType) -> None:
    pytest.importorskip("packaging")
    names = ["x-1-cp313-cp313-manylinux_2_28_x86_64.whl", "x-1-cp313-cp313-macosx_15_0_arm64.whl", "x-1-cp312-cp312-macosx_11_0_arm64.whl"]
    wheels = [{"url": f"https://files.pythonhosted.org/{name}", "hashes": {"sha256": name}} for name in names]
    with pytest.raises(SystemExit, match="x 1 has no wheel for macOS 14 on arm64"):
        generate.best_wheel({"name": "x", "version": "1", "wheels": wheels})
    fitting = ["x-1-py3-none-any.whl", "x-1-cp313-cp313-macosx_14_0_arm64.whl", "x-1-cp313-cp313-macosx_11_0_universal2.whl"]
    wheels += [{"url": f"https://files.pythonhosted.org/{name}", "hashes": {"sha256": name}} for name in fitting]
    assert generate.best_wheel({"name": "x", "version": "1", "wheels": wheels})["sha256"] == fitting[1], "the newest that fits"


@pytest.mark.skipif(shutil.which("ruby") is None, reason="no ruby here")
def test_formula_is_ruby() -> None:
    subprocess.run(["ruby", "-c", str(HOMEBREW / "mlxinfer.rb")], check=True, capture_output=True)


def test_version_is_in_one_place(generate: ModuleType) -> None:
    assert generate.version_of_the_tree() == __version__
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'version = { attr = "mlxinfer._version.__version__" }' in text
    assert not re.search(r'^version = "', text, re.MULTILINE)


def test_workflow_publishes_only_tags_and_only_what_all_jobs_made() -> None:
    jobs = RELEASE["jobs"]
    assert RELEASE[True] == {"push": {"tags": ["v*"]}, "workflow_dispatch": None}, "YAML reads `on` as true"
    for name, job in jobs.items():
        needs = job.get("needs", [])
        assert {needs} <= jobs.keys() if isinstance(needs, str) else set(needs) <= jobs.keys(), name
        assert "timeout-minutes" in job, name
    publish = jobs["publish"]
    assert publish["if"] == "github.event_name == 'push'"
    assert set(publish["needs"]) == {"sdist", "mac", "linux", "formula"}
    assert publish["permissions"] == {"contents": "write", "id-token": "write", "attestations": "write"}
    assert RELEASE["permissions"] == {"contents": "read"}
    assert not [name for name, job in jobs.items() if "permissions" in job and name != "publish"]
    matrix = jobs["linux"]["strategy"]["matrix"]
    assert matrix == {"os": ["ubuntu-22.04", "ubuntu-22.04-arm"], "python": ["3.10", "3.11", "3.12", "3.13", "3.14"]}


def test_workflow_downloads_what_was_uploaded() -> None:
    steps = [(job, step) for job in RELEASE["jobs"].values() for step in job["steps"] if "with" in step]
    uploaded = {step["with"]["name"] for _, step in steps if "upload-artifact" in step["uses"]}
    wanted = [step["with"] for _, step in steps if "download-artifact" in step["uses"]]
    assert {options["name"] for options in wanted if "name" in options} <= uploaded
    assert [options["pattern"] for options in wanted if "pattern" in options] == ["dist-*"]
    assert {name for name in uploaded if not name.startswith("dist-")} == {"formula"}


@pytest.mark.parametrize("name", list(RELEASE["jobs"]))
def test_workflow_scripts_are_shell(name: str) -> None:
    for step in RELEASE["jobs"][name]["steps"]:
        if "run" in step:
            script = re.sub(r"\$\{\{.*?\}\}", "x", step["run"])
            subprocess.run(["bash", "-n", "-c", script], check=True)


def test_manifest_at_the_root_has_the_sources_of_the_package() -> None:
    inner = (ROOT / "swift" / "MLXInferClient" / "Package.swift").read_text(encoding="utf-8")
    outer = (ROOT / "Package.swift").read_text(encoding="utf-8")
    for line in ("// swift-tools-version: 6.0", "platforms: [.macOS(.v14)]", "swiftLanguageModes: [.v6]"):
        assert line in inner
        assert line in outer
    for name in LIBRARIES:
        assert f'.library(name: "{name}", targets: ["{name}"])' in inner
        assert f'.library(name: "{name}", targets: ["{name}"])' in outer
    paths = re.findall(r'path: "(.+?)"', outer)
    assert paths == [f"swift/MLXInferClient/Sources/{name}" for name in LIBRARIES]
    assert all(list((ROOT / path).rglob("*.swift")) for path in paths)
    assert "unsafeFlags" not in outer  # packages with such flags cannot be added by their URL


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("swift") is None, reason="no Swift toolchain here")
def test_manifest_at_the_root_loads(tmp_path: Path) -> None:
    command = ["swift", "package", "--scratch-path", str(tmp_path), "--package-path", str(ROOT), "dump-package"]
    manifest = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert [target["name"] for target in manifest["targets"]] == LIBRARIES
    assert manifest["dependencies"] == []


def test_wheels_for_linux_require_the_mlx_they_were_built_for(tmp_path: Path) -> None:
    from importlib.metadata import version

    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, tmp_path)
    (tmp_path / "mlxinfer").mkdir()
    for name in ("__init__.py", "_version.py"):
        shutil.copy2(ROOT / "mlxinfer" / name, tmp_path / "mlxinfer")
    command = [sys.executable, "setup.py", "-q", "dist_info"]
    found = {}
    for setting in ("0", "1"):
        settings = {"PATH": "/usr/bin:/bin", "MLXINFER_CPU_KERNELS": "0", "MLXINFER_EXACT_MLX": setting}
        subprocess.run(command, cwd=tmp_path, env=settings, check=True, capture_output=True)
        (info,) = tmp_path.glob("*.dist-info")
        lines = (info / "METADATA").read_text(encoding="utf-8").splitlines()
        found[setting] = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist:")]
        shutil.rmtree(info)
    (range_,) = [line for line in found["0"] if line.startswith("mlx[cpu]")]
    assert range_ == 'mlx[cpu]<0.33,>=0.32.2; sys_platform == "linux"'
    exact = f'mlx[cpu]=={version("mlx")}; sys_platform == "linux"'
    assert sorted(found["1"]) == sorted(exact if line == range_ else line for line in found["0"])
