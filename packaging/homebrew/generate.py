"""Writes mlxinfer.rb, the Homebrew formula, from lock.json: one wheel of the package index for each dependency on a Mac.

    python packaging/homebrew/generate.py lock       # resolve anew for macOS 14 on Apple silicon; needs uv, packaging and the index
    python packaging/homebrew/generate.py formula    # write mlxinfer.rb from lock.json; needs nothing else
    python packaging/homebrew/generate.py release dist/mlxinfer-1.0-py3-none-any.whl   # the same, with that wheel as what is installed

A formula names files by address and SHA-256, so a release knows its own line only when its wheel is built: until then `release` in
lock.json is null, and the formula says so when it is installed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
LOCK, FORMULA = FOLDER / "lock.json", FOLDER / "mlxinfer.rb"
PYTHON, MACOS = (3, 13), (14, 0)
FILES = "https://files.pythonhosted.org/"

HEAD = """\
# Written by packaging/homebrew/generate.py from lock.json; edit those.
class Mlxinfer < Formula
  desc "Inference for Apple silicon: chat, Python library and local server"
  homepage "https://pypi.org/project/mlxinfer/"
{release}
  license all_of: ["Apache-2.0", "BSD-3-Clause", "MIT"]

  depends_on arch: :arm64
  depends_on macos: :sonoma
  depends_on "python@{python}"

  # Wheels come with names relative to @rpath, which stay right where they are.
  preserve_rpath
"""
TAIL = """
  def install
    # Everything is a wheel: nothing is compiled, and nothing is fetched that is not listed above.
    wheels = buildpath/"wheels"
    wheels.mkpath
    resources.each { |resource| resource.stage { wheels.install Dir["*.whl"] } }
    wheels.install Dir["mlxinfer-*.whl"]

    python = Formula["python@PYTHON"].opt_bin/"pythonPYTHON"
    system python, "-m", "venv", "--without-pip", libexec
    system python, "-m", "pip", "--python=#{libexec}/bin/python", "install", "--no-index", "--no-deps", "--no-compile",
           *Dir[wheels/"*.whl"]
    bin.install_symlink libexec/"bin/mlxinfer"
    generate_completions_from_executable(bin/"mlxinfer", "completion", shells: [:bash, :zsh, :fish])
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/mlxinfer --version")
    assert_match "mlxinfer", shell_output("#{bin}/mlxinfer completion zsh")
  end
end
"""
UNRELEASED = '''\
  # Not released yet: `generate.py release WHEEL` writes this wheel's address and digest here.
  url "{files}packages/py3/m/mlxinfer/mlxinfer-{version}-py3-none-any.whl", using: :nounzip
  version "{version}"
  sha256 "{none}"'''
RELEASED = '''\
  url "{url}", using: :nounzip
  version "{version}"
  sha256 "{sha256}"'''
RESOURCE = """
  resource "{name}" do
    url "{url}", using: :nounzip
    sha256 "{sha256}"
  end
"""


def version_of_the_tree() -> str:
    """From the one place that has it; read as text, as importing the package needs its dependencies."""
    return (ROOT / "mlxinfer" / "_version.py").read_text(encoding="utf-8").split('"')[1]


def resolve() -> list[dict[str, Any]]:
    """What uv resolves pyproject.toml's dependencies to on a Mac, with every wheel that fits there: lists of pylock.toml (PEP 751)."""
    import tomllib

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "pylock.toml"
        command = ["uv", "pip", "compile", "pyproject.toml", "--quiet", "--no-header", "--format", "pylock.toml", "--only-binary", ":all:"]
        command += ["--python-platform", "aarch64-apple-darwin", "--python-version", ".".join(map(str, PYTHON)), "--output-file", str(out)]
        environment = os.environ | {"MACOSX_DEPLOYMENT_TARGET": ".".join(map(str, MACOS))}
        subprocess.run(command, check=True, cwd=ROOT, env=environment)
        packages: list[dict[str, Any]] = tomllib.loads(out.read_text(encoding="utf-8"))["packages"]
    return packages


def best_wheel(package: dict[str, Any]) -> dict[str, str]:
    """The wheel that pip would take on such a Mac."""
    from packaging.tags import compatible_tags, cpython_tags, mac_platforms
    from packaging.utils import parse_wheel_filename

    platforms = list(mac_platforms(MACOS, "arm64"))
    tags = [*cpython_tags(PYTHON, platforms=platforms), *compatible_tags(PYTHON, f"cp{PYTHON[0]}{PYTHON[1]}", platforms)]
    order = {tag: place for place, tag in enumerate(tags)}
    found = []
    for wheel in package["wheels"]:
        fitting = [order[tag] for tag in parse_wheel_filename(wheel["url"].rpartition("/")[2])[3] if tag in order]
        if fitting:
            found.append((min(fitting), wheel["url"], wheel["hashes"]["sha256"]))
    if not found:
        raise SystemExit(f"{package['name']} {package['version']} has no wheel for macOS {MACOS[0]} on arm64")
    _, url, digest = min(found)
    return {"name": package["name"], "version": package["version"], "url": url, "sha256": digest}


def read_lock() -> dict[str, Any]:
    lock: dict[str, Any] = json.loads(LOCK.read_text(encoding="utf-8"))
    return lock


def write_lock() -> None:
    packages = sorted((best_wheel(package) for package in resolve()), key=lambda package: package["name"])
    target = {"python": ".".join(map(str, PYTHON)), "macos": ".".join(map(str, MACOS)), "arch": "arm64"}
    LOCK.write_text(json.dumps({"target": target, "release": None, "packages": packages}, indent=1) + "\n", encoding="utf-8")


def released(wheel: Path) -> dict[str, str]:
    """The line of the formula for a wheel that was built here and is to be uploaded: the index has such an address for every file."""
    name, version, *_ = wheel.name.split("-")
    url = f"{FILES}packages/py3/{name[0]}/{name}/{wheel.name}"
    return {"version": version, "url": url, "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest()}


def formula(lock: dict[str, Any]) -> str:
    """The text of mlxinfer.rb."""
    if lock["release"]:
        release = RELEASED.format(**lock["release"])
    else:
        release = UNRELEASED.format(files=FILES, version=version_of_the_tree(), none="0" * 64)
    python = lock["target"]["python"]
    resources = "".join(RESOURCE.format(**package) for package in lock["packages"])
    return HEAD.format(release=release, python=python) + resources + TAIL.replace("PYTHON", python)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["lock", "formula", "release"])
    parser.add_argument("wheel", nargs="?", type=Path, help="with release: the wheel that is uploaded")
    parser.add_argument("--output", type=Path, default=FORMULA, help="instead of mlxinfer.rb next to this file")
    arguments = parser.parse_args()
    if (arguments.action == "release") != (arguments.wheel is not None):
        parser.error("release needs a wheel, and nothing else does")
    if arguments.action == "lock":
        write_lock()
    lock = read_lock()
    if arguments.wheel is not None:
        lock["release"] = released(arguments.wheel)
    arguments.output.write_text(formula(lock), encoding="utf-8")


if __name__ == "__main__":
    main()
