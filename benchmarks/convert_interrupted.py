"""A conversion that is killed again and again, in bounded memory: `python -m benchmarks.convert_interrupted --folder FOLDER`.

A synthetic bfloat16 Llama of some GB is written into the folder once. Each call converts it for at most `--seconds`, in processes that are
killed (SIGKILL) after random times until `--kills` are used up, and says when it is done: what was resident at most, how often it was
killed, and a digest of the result. `--whole` converts it without killing, for the same digest; delete the folder afterwards.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click

from .convert_rss import sizes, write_source

CONVERT = """
import json, sys
from mlxinfer.convert import convert
report = convert(sys.argv[1], sys.argv[2], measure=False, **json.loads(sys.argv[3]))
print(json.dumps({"nbytes": report.nbytes, "bits": report.bits_per_weight, "notes": report.notes}))
"""
_POLL = 0.2


def peak(pid: int) -> int:
    """Bytes that a process has had resident at most; 0 once it is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("VmHWM")), 0)


def attempt(source: Path, out: Path, options: dict[str, Any], seconds: float) -> tuple[str | None, int, float]:
    """Convert for so long: (what it printed, None if it was killed; peak in bytes; seconds)."""
    begun, most = time.perf_counter(), 0
    command = [sys.executable, "-c", CONVERT, str(source), str(out), json.dumps(options)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None and time.perf_counter() - begun < seconds:
            most = max(most, peak(process.pid))
            time.sleep(_POLL)
        took = time.perf_counter() - begun
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            return None, most, took
        printed = process.communicate()[0]
    if process.returncode:
        raise SystemExit(process.returncode)
    return printed, most, took


def digest(directory: Path) -> str:
    """A digest of all files and their names."""
    found = hashlib.blake2b(digest_size=16)
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            found.update(str(path.relative_to(directory)).encode())
            with path.open("rb") as file:
                while piece := file.read(1 << 22):
                    found.update(piece)
    return found.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--gigabytes", type=float, default=8.0)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=400.0)
    parser.add_argument("--between", type=float, nargs=2, default=(10.0, 60.0), help="seconds from start to kill")
    parser.add_argument("--options", type=json.loads, default={"bits": 4, "max_memory": 1.4})
    parser.add_argument("--whole", action="store_true")
    asked = parser.parse_args()
    source, out, state = asked.folder / "source", asked.folder / ("whole" if asked.whole else "out"), asked.folder / "state.json"
    end = time.perf_counter() + asked.seconds
    if not source.exists():
        asked.folder.mkdir(exist_ok=True)
        write_source(source, asked.gigabytes)
        total, largest = sizes(source)
        state.write_text(json.dumps({"kills": 0, "peak": 0, "seconds": 0.0, "source": total, "largest": largest}))
    known: dict[str, Any] = json.loads(state.read_text())
    chosen = random.Random(known["kills"])
    while (left := end - time.perf_counter()) > 5:
        again = not asked.whole and known["kills"] < asked.kills
        printed, most, took = attempt(source, out, asked.options, min(left, chosen.uniform(*asked.between)) if again else left)
        known["peak"], known["seconds"] = max(known["peak"], most), known["seconds"] + took
        known["kills"] += printed is None
        state.write_text(json.dumps(known))
        click.echo(f"{'killed' if printed is None else 'done'} after {took:.0f} s, peak {most / 1e6:.0f} MB")
        if printed is not None:
            click.echo(f"{printed.strip()}\n{json.dumps(known)}\ndigest {digest(out)}")
            return


if __name__ == "__main__":
    main()
