"""The memory that a process may have, from files as Linux writes them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlxinfer.util.device import cgroup_limits, memory_limit

UNLIMITED_V1 = 9223372036854771712


def system(tmp_path: Path, cgroup: str, mounts: str, files: dict[str, str]) -> Path:
    """A /proc/self with these two files, in which `@` stands for the directory that holds the groups."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text(cgroup)
    (proc / "mountinfo").write_text(mounts.replace("@", str(tmp_path)))
    return proc


V2 = "30 23 0:26 / @/v2 rw,nosuid - cgroup2 cgroup2 rw\n"


def test_version_2_counts_the_own_group_and_all_above_it(tmp_path):
    files = {"v2/a/b/memory.max": "max", "v2/a/memory.max": "3000", "v2/a/memory.high": "2000", "v2/other/memory.max": "1"}
    proc = system(tmp_path, "0::/a/b\n", V2, files)
    assert sorted(cgroup_limits(proc)) == [(2000, "control group, memory.high"), (3000, "control group, memory.max")]


def test_a_container_sees_its_group_as_the_root(tmp_path):
    assert list(cgroup_limits(system(tmp_path, "0::/\n", V2, {"v2/memory.max": "700"}))) == [(700, "control group, memory.max")]


def test_a_group_outside_of_what_is_mounted_is_the_mount(tmp_path):
    mounts = "30 23 0:26 /docker/1 @/v2 rw - cgroup2 cgroup2 rw\n"
    proc = system(tmp_path, "0::/docker/1/inner\n", mounts, {"v2/memory.max": "900", "v2/inner/memory.max": "800"})
    assert sorted(limit for limit, _ in cgroup_limits(proc)) == [800, 900]
    (proc / "cgroup").write_text("0::/elsewhere\n")
    assert [limit for limit, _ in cgroup_limits(proc)] == [900]


def test_version_1_counts_as_well(tmp_path):
    mounts = "35 31 0:32 / @/cpu rw - cgroup cgroup rw,cpu\n36 31 0:33 / @/mem rw - cgroup cgroup rw,memory\n"
    files = {"mem/memory.limit_in_bytes": str(UNLIMITED_V1), "mem/a/memory.limit_in_bytes": "5000", "cpu/a/memory.limit_in_bytes": "1"}
    proc = system(tmp_path, "4:memory:/a\n1:cpu:/a\n0::/\n", mounts, files)
    assert sorted(limit for limit, _ in cgroup_limits(proc)) == [5000, UNLIMITED_V1]
    assert memory_limit(proc) == (5000, "control group, memory.limit_in_bytes")


def test_where_there_are_none_it_is_the_physical_memory(tmp_path):
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert memory_limit(tmp_path) == (physical, "physical memory")


@pytest.mark.skipif(sys.platform != "linux" or "MLXINFER_MAC_LIKE" in os.environ, reason="a Mac does not hold processes to these limits")
@pytest.mark.parametrize(("kind", "name"), [("RLIMIT_AS", "address space"), ("RLIMIT_DATA", "data")])
def test_resource_limits_count_without_what_the_process_has(kind, name):
    code = (
        "import resource; from mlxinfer.util.device import memory_limit\n"
        f"resource.setrlimit(resource.{kind}, (2**31, resource.RLIM_INFINITY)); first = memory_limit()\n"
        "held = bytearray(2**28); print(first == memory_limit(), *first)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    same, limit, source = done.stdout.strip().split(" ", 2)
    assert same == "True"  # what comes later is the model, which a plan counts itself
    assert 2**30 < int(limit) < 2**31
    assert source == f"resource limit of {name}"
