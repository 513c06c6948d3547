"""Builds `mlxinfer.kernels_cpu._native` with CMake, where that can be done; everything else is in pyproject.toml.

`MLXINFER_CPU_KERNELS=1` asks for them, with nanobind and cmake installed and `--no-build-isolation`; without it nothing is compiled.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

PACKAGE = Path(__file__).parent.resolve() / "mlxinfer" / "kernels_cpu"
WANTED = os.environ.get("MLXINFER_CPU_KERNELS") == "1"
NOTE = "_native.json"


class CannotBuild(Exception):
    """Why there are no native operations."""


class BuildWithCMake(build_ext):
    def run(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for stale in self.get_outputs():
            Path(stale).unlink()
        try:
            note = {"mlx": self.compile()}
        except CannotBuild as problem:
            raise SystemExit(f"mlxinfer: the CPU kernels cannot be built: {problem}") from problem
        (self.folder / NOTE).write_text(json.dumps(note) + "\n", encoding="utf-8")

    @property
    def folder(self) -> Path:
        """Where the module goes: into the tree for an editable install."""
        return PACKAGE if self.inplace else Path(self.build_lib).resolve() / "mlxinfer" / "kernels_cpu"

    def compile(self) -> str:
        """Build the module; the version of MLX that it is for."""
        try:
            mlx, _ = version("mlx"), version("nanobind")
        except PackageNotFoundError as error:
            raise CannotBuild(f"the package {error.name} is not there to build against") from error
        cmake, ninja = tool("cmake"), tool("ninja")
        if cmake is None:
            raise CannotBuild("cmake was not found")
        if not (os.environ.get("CXX") or any(map(shutil.which, ("c++", "g++", "clang++")))):
            raise CannotBuild("no C++ compiler was found (Debian: apt install g++)")
        build = Path(self.build_temp).resolve() / "kernels_cpu"
        shutil.rmtree(build, ignore_errors=True)
        options = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []
        options += [f"-DPython_EXECUTABLE={sys.executable}", f"-DMLXINFER_OUTPUT={self.folder}"]
        execute([cmake, "-S", str(PACKAGE), "-B", str(build), *options])
        execute([cmake, "--build", str(build), "--parallel"])
        return mlx

    def get_outputs(self) -> list[str]:
        return sorted(str(path) for path in self.folder.glob("_native.*") if path.suffix in {".so", ".json"})

    def get_output_mapping(self) -> dict[str, str]:
        return {}


def tool(name: str) -> str | None:
    """A program on the path, or beside the interpreter, where packages of the environment install it."""
    return shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))


def execute(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.stderr.write(done.stdout[-6000:] + done.stderr[-6000:])
        errors = [line.strip() for line in (done.stdout + done.stderr).splitlines() if "error" in line.lower()]
        raise CannotBuild(f"{' '.join(command[:2])} failed: {errors[0] if errors else 'see the output of pip install -v'}")


setup(ext_modules=[Extension("mlxinfer.kernels_cpu._native", [])] if WANTED else [], cmdclass={"build_ext": BuildWithCMake})
