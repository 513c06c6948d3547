"""Memory pressure, from files as Linux writes them and from the level of macOS."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mlxinfer.util.memory_pressure import Pressure, memory_pressure

TOTAL = 100_000_000
V1 = "36 31 0:33 / @/mem rw - cgroup cgroup rw,memory\n"
V2 = "30 23 0:26 / @/v2 rw - cgroup2 cgroup2 rw\n"

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")


def system(folder: Path, *, cgroup: str = "", mounts: str = "", available: int = TOTAL, stalls: float = 0.0, **files: str) -> Path:
    """A /proc; keywords are files of control groups, with `__` for a slash and `_` for a dot after the first word."""
    proc = folder / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "pressure").mkdir()
    (proc / "self" / "cgroup").write_text(cgroup)
    (proc / "self" / "mountinfo").write_text(mounts.replace("@", str(folder)))
    (proc / "meminfo").write_text(f"MemTotal: {TOTAL // 1024} kB\nMemAvailable:  {available // 1024} kB\n")
    (proc / "pressure" / "memory").write_text(f"some avg10={stalls} avg60=0.00 avg300=0.00 total=0\nfull avg10=0.00\n")
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("memory_", "memory.")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return proc


@on_linux
def test_free_memory_of_the_system_leaves_a_margin(tmp_path):
    assert memory_pressure(TOTAL, proc=system(tmp_path / "a", available=50_000_000)) == Pressure(0, 44_999_872)
    assert memory_pressure(TOTAL, 40_000_000, proc=tmp_path / "a" / "proc").spare == 4_999_872
    short = memory_pressure(TOTAL, proc=system(tmp_path / "b", available=1_024_000))
    assert short == Pressure(10_000_000 - 1_024_000, 0)


@on_linux
@pytest.mark.parametrize(("used", "expected"), [(40, Pressure(0, 8_000_000)), (48, Pressure(0, 0)), (49, Pressure(3_000_000, 0))])
def test_a_group_of_version_2_counts_without_pages_of_files(tmp_path, used, expected):
    stat = "anon 1\ninactive_file 6000000\nactive_file 4000000\n"
    files = {"v2__a__memory_max": "40000000", "v2__a__memory_current": f"{used}000000", "v2__a__memory_stat": stat}
    assert memory_pressure(TOTAL, proc=system(tmp_path, cgroup="0::/a\n", mounts=V2, **files)) == expected


@on_linux
def test_a_group_of_version_1_counts_those_below_it_too(tmp_path):
    files = {
        "mem__memory_limit_in_bytes": "9223372036854771712",
        "mem__a__memory_limit_in_bytes": "20000000",
        "mem__a__memory_usage_in_bytes": "25000000",
        "mem__a__memory_stat": "inactive_file 1\ntotal_inactive_file 2000000\ntotal_active_file 3000000\n",
    }
    assert memory_pressure(TOTAL, proc=system(tmp_path, cgroup="4:memory:/a\n", mounts=V1, **files)) == Pressure(2_000_000, 0)


@on_linux
def test_stalls_count_where_memory_is_nearly_used_up(tmp_path):
    assert memory_pressure(TOTAL, proc=system(tmp_path / "a", available=90_000_000, stalls=50.0)) == Pressure(0, 0)
    assert memory_pressure(TOTAL, proc=system(tmp_path / "b", available=7_000_000, stalls=50.0)) == Pressure(2_000_000, 0)
    assert memory_pressure(TOTAL, proc=system(tmp_path / "c", available=7_000_000, stalls=1.0)).short == 0


@on_linux
def test_a_system_that_reports_nothing_has_no_pressure(tmp_path):
    assert memory_pressure(TOTAL, proc=tmp_path) == Pressure(0, 0)


@pytest.mark.parametrize(("level", "short"), [(1, 0), (2, 2_000_000), (4, 8_000_000)])
def test_levels_of_macos(level, short):
    found = memory_pressure(TOTAL, level=level)
    assert found.short == short
    assert (found.spare > 0) == (short == 0)


def test_this_system_is_read():
    assert memory_pressure(TOTAL).spare >= 0
