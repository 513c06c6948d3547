"""Builds `mlxinfer.kernels_cpu._native` with CMake, where that can be done; everything else is in pyproject.toml.

On Linux they are built where a C++ compiler is present, and left out with a note where not. `MLXINFER_CPU_KERNELS=1` asks for them
anywhere and makes a failure an error; `MLXINFER_CPU_KERNELS=0` leaves them out, and a wheel is then `py3-none-any`, as on a Mac.
They are compiled for the best instruction set of this machine. `MLXINFER_ALL_ISAS=1`, for wheels that are handed out, compiles them for
all of its architecture; `MLXINFER_EXACT_MLX=1` makes the wheel require the version of MLX that its kernels were built for.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.egg_info import egg_info

PACKAGE = Path(__file__).parent.resolve() / "mlxinfer" / "kernels_cpu"
ISAS = "all" if os.environ.get("MLXINFER_ALL_ISAS") == "1" else "native"
SETTING = os.environ.get("MLXINFER_CPU_KERNELS", "")
WANTED = SETTING == "1" or (SETTING != "0" and sys.platform == "linux")
NOTE = "_native.json"
SUITS = "import mlx.core, _native; raise SystemExit(_native.machine_isa() not in _native.compiled_isas())"
TRIAL = "import mlx.core as mx, _native; mx.eval(_native.silu_multiply(mx.ones((3,)), mx.ones((3,))))"


class CannotBuild(Exception):
    """Why there are no native operations."""


class WithExactMLX(egg_info):
    """With another version of MLX the kernels would not be loaded, and everything would run thirty times slower."""

    def run(self) -> None:
        if os.environ.get("MLXINFER_EXACT_MLX") == "1":
            # The attribute of the distribution for setuptools' own files, that of the metadata for Requires-Dist.
            for holder in (self.distribution, self.distribution.metadata):
                holder.install_requires = [exact(line) for line in self.distribution.install_requires]
        super().run()


class BuildWithCMake(build_ext):
    def run(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            note = {"mlx": requirement("mlx"), "sources": fingerprint(), "isas": ISAS}
            if self.is_current(note):
                return
            self.remove_what_is_there()
            sets = "all instruction sets of its architecture" if ISAS == "all" else "the instruction set of this machine"
            announce(f"compiling the CPU kernels for {sets}")
            try:
                self.compile()
            finally:
                announce("")
        except CannotBuild as problem:
            if SETTING == "1":
                raise SystemExit(f"mlxinfer: the CPU kernels cannot be built: {problem}") from problem
            self.remove_what_is_there()
            note = {"failed": str(problem)}
            sys.stderr.write(f"mlxinfer is installed without its CPU kernels: {problem}\n")
        (self.folder / NOTE).write_text(json.dumps(note) + "\n", encoding="utf-8")

    @property
    def folder(self) -> Path:
        """Where the module goes: into the tree for an editable install."""
        return PACKAGE if self.inplace else Path(self.build_lib).resolve() / "mlxinfer" / "kernels_cpu"

    @property
    def module(self) -> Path:
        return self.folder / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"

    def is_current(self, note: dict[str, str]) -> bool:
        """True for a module of the same sources that has what this machine needs, and all instruction sets if they are wanted."""
        try:
            there = json.loads((self.folder / NOTE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        if there not in (note, note | {"isas": "all"}) or not self.module.exists():
            return False
        return there["isas"] == "all" or subprocess.call([sys.executable, "-c", SUITS], cwd=self.folder) == 0

    def remove_what_is_there(self) -> None:
        for stale in (self.module, self.folder / NOTE):
            stale.unlink(missing_ok=True)

    def compile(self) -> None:
        cmake, ninja = tool("cmake"), tool("ninja")
        if cmake is None:
            raise CannotBuild("cmake was not found")
        if not (os.environ.get("CXX") or any(map(shutil.which, ("c++", "g++", "clang++")))):
            raise CannotBuild("no C++ compiler was found (Debian: apt install g++)")
        build = Path(self.build_temp).resolve() / "kernels_cpu"
        shutil.rmtree(build, ignore_errors=True)
        options = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []
        options += [f"-DPython_EXECUTABLE={sys.executable}", f"-DMLXINFER_OUTPUT={self.folder}", f"-DMLXINFER_ISAS={ISAS}"]
        execute([cmake, "-S", str(PACKAGE), "-B", str(build), *options])
        execute([cmake, "--build", str(build), "--parallel"])
        execute([sys.executable, "-c", TRIAL], cwd=self.folder)

    def get_outputs(self) -> list[str]:
        return [str(path) for path in (self.module, self.folder / NOTE) if path.exists()]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


def announce(step: str) -> None:
    """Name what begins to the one who waits (packaging/step.py): pip shows nothing of a build. Empty: it is done."""
    if os.environ.get("MLXINFER_BUILD_STEPS"):
        with open(os.environ["MLXINFER_BUILD_STEPS"], "a", encoding="utf-8") as file:
            file.write(f"{step}\n")


def requirement(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError as error:
        raise CannotBuild(f"the package {package} is not there to build against") from error


def exact(line: str) -> str:
    """A requirement as it is, or, if it is MLX for Linux, for the version that is here."""
    start, marker = line.partition(";")[::2]
    return f"mlx[cpu]=={requirement('mlx')};{marker}" if start.startswith("mlx[cpu]") else line


def fingerprint() -> str:
    """Of everything that the module is made from: a build that would give the same one again is not repeated."""
    digest = hashlib.sha256(f"{requirement('mlx')} {requirement('nanobind')} {os.environ.get('CXX')} {sys.version}".encode())
    for path in sorted([PACKAGE / "CMakeLists.txt", *(PACKAGE / "src").rglob("*.[ch]*")]):
        digest.update(path.relative_to(PACKAGE).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def tool(name: str) -> str | None:
    """A program on the path, or beside the interpreter, where packages of the environment install it."""
    return shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))


def execute(command: list[str], cwd: Path | None = None) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)
    if done.returncode != 0:
        output = done.stdout + done.stderr
        sys.stderr.write(output[-6000:])
        errors = [line.strip() for line in output.splitlines() if "error" in line.lower()]
        raise CannotBuild(f"{' '.join(command[:2])} failed: {errors[0] if errors else 'see the output of pip install -v'}")


setup(
    ext_modules=[Extension("mlxinfer.kernels_cpu._native", [])] if WANTED else [],
    cmdclass={"build_ext": BuildWithCMake, "egg_info": WithExactMLX},
)
