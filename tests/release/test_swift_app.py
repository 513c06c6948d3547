"""The example app for Macs and what comes with the Swift package: sizes, property lists, the bundle, the index's settings."""

from __future__ import annotations

import os
import plistlib
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
APP = ROOT / "examples/swift/MenuBarChat"
GROUP = "com.apple.security.application-groups"


def test_the_app_has_at_most_400_lines() -> None:
    sources = list(APP.glob("Sources/**/*.swift"))
    assert len(sources) > 4
    assert sum(len(file.read_text(encoding="utf-8").splitlines()) for file in sources) <= 400


def bundle(folder: Path, *arguments: str) -> str:
    """Make the app as on a Mac, with stand-ins for its compiler and for codesign; returns how codesign was called."""
    shutil.copytree(APP, folder / "app", ignore=shutil.ignore_patterns(".build"))
    programs, built = folder / "bin", folder / "app/.build"
    programs.mkdir()
    (built / "release").mkdir(parents=True)
    (built / "release/MenuBarChat").write_text("a program")
    for name, script in (
        ("swift", 'case "$*" in *show-bin-path) echo .build/release ;; esac'),
        ("codesign", f'echo "$@" > "{folder}/signed"'),
    ):
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(["sh", str(folder / "app/bundle.sh"), *arguments], check=True, env=os.environ | {"PATH": path, "IDENTITY": "Me"})
    assert (folder / "app/MenuBarChat.app/Contents/MacOS/MenuBarChat").read_text() == "a program"
    return (folder / "signed").read_text().strip()


def properties(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = plistlib.loads(file.read_bytes())
    return found


def test_a_bundle(tmp_path: Path) -> None:
    assert bundle(tmp_path) == "--force --sign Me MenuBarChat.app"
    made = properties(tmp_path / "app/MenuBarChat.app/Contents/Info.plist")
    assert "AppGroup" not in made
    assert made["CFBundleExecutable"] == "MenuBarChat"
    assert made["LSUIElement"] is True


def test_a_bundle_for_the_sandbox(tmp_path: Path) -> None:
    assert "--entitlements .build/MenuBarChat.entitlements MenuBarChat.app" in bundle(tmp_path, "XYZ.talk")
    assert properties(tmp_path / "app/MenuBarChat.app/Contents/Info.plist")["AppGroup"] == "XYZ.talk"
    allowed = properties(tmp_path / "app/.build/MenuBarChat.entitlements")
    assert allowed[GROUP] == ["XYZ.talk"]
    page = (ROOT / "docs/swift.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in page for name in allowed)


def test_the_path_of_the_socket_is_that_of_the_documents() -> None:
    (group,) = properties(APP / "MenuBarChat.entitlements")[GROUP]
    source = (APP / "Sources/MenuBarChatModel/ServerSettings.swift").read_text(encoding="utf-8")
    (end,) = re.findall(r'appendingPathComponent\("(.+?)"\)', source)
    pages = [ROOT / "docs/swift.md", *ROOT.glob("swift/MLXInferClient/Sources/MLXInferClient/*.docc/Sandbox.md")]
    assert len(pages) == 2
    for page in pages:
        assert f"Group Containers/{group}/{end}" in page.read_text(encoding="utf-8")


def test_the_index_documents_targets_of_the_package() -> None:
    (settings,) = yaml.safe_load((ROOT / ".spi.yml").read_text(encoding="utf-8"))["builder"]["configs"]
    manifest = (ROOT / "Package.swift").read_text(encoding="utf-8")
    for target in settings["documentation_targets"]:
        assert f'.library(name: "{target}"' in manifest
        assert list((ROOT / "swift/MLXInferClient/Sources" / target).glob("*.docc/*.md"))


@pytest.mark.parametrize("script", ["swift/check.sh", "swift/check-api.sh", "examples/swift/MenuBarChat/bundle.sh"])
def test_scripts_are_those_of_any_shell(script: str) -> None:
    subprocess.run(["sh", "-n", str(ROOT / script)], check=True)


def test_changes_of_the_api_are_sought_on_a_mac() -> None:
    job = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text(encoding="utf-8"))["jobs"]["swift-api"]
    assert job["runs-on"].startswith("macos")
    assert job["steps"][0]["with"]["fetch-depth"] == 0
    assert job["steps"][1]["run"] == "sh swift/check-api.sh"


def test_the_api_is_compared_with_the_last_tag(tmp_path: Path) -> None:
    (tmp_path / "swift").mkdir()
    shutil.copy(ROOT / "swift/check-api.sh", tmp_path / "swift")
    (tmp_path / "program").mkdir()
    (tmp_path / "program/swift").write_text('#!/bin/sh\necho "$@"\nexit 1\n')
    (tmp_path / "program/swift").chmod(0o755)
    nobody = {f"GIT_{who}_{what}": "x@y" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    environment = os.environ | nobody | {"PATH": f"{tmp_path / 'program'}{os.pathsep}{os.environ['PATH']}", "GIT_CONFIG_GLOBAL": os.devnull}

    def run(*words: str, status: int = 0) -> str:
        done = subprocess.run(words, cwd=tmp_path, env=environment, check=False, capture_output=True, text=True)
        assert done.returncode == status, done.stderr
        return done.stdout

    run("git", "init", "--quiet")
    for message in ("one", "two"):
        run("git", "commit", "--quiet", "--allow-empty", "--message", message)
    options = "--breakage-allowlist-path swift/api-breakages.txt\n"
    unreleased = run("sh", "swift/check-api.sh")
    assert f"diagnose-api-breaking-changes HEAD~1 {options}" in unreleased
    assert "changes are allowed" in unreleased
    run("git", "tag", "v0.2.0", "HEAD~1")
    run("git", "tag", "other")
    assert f"changes v0.2.0 {options}" in run("sh", "swift/check-api.sh", status=1)
    assert f"changes main {options}" in run("sh", "swift/check-api.sh", "main", status=1)
