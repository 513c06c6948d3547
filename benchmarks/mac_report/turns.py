"""Measures programs in turns, each run in a process of its own, and prints medians and ratios: `python -m benchmarks.mac_report.turns`.

`mlx-lm MODEL` compares this project with mlx-lm, `variables MODEL NAME=VALUE...` the same program with variables of the environment. The
table is printed after every round, so that the rounds until an interruption count.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .running import output_of

_LIMIT_S = 900.0
"""Time limit of one run."""


@dataclass(slots=True)
class Subject:
    """A program with its settings, and the tokens/s that its runs reached."""

    name: str
    command: list[str]
    read: Callable[[str], float]
    """Finds tokens/s in the output. Raises ValueError."""
    environment: dict[str, str] = field(default_factory=dict)
    speeds: list[float] = field(default_factory=list)

    def measure(self) -> None:
        """Run it once. Raises ValueError with the last line of its output if it fails."""
        try:
            output = output_of(self.command, self.environment, _LIMIT_S)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None
        self.speeds.append(self.read(output))


def ours(model: str, streams: int, prompt: int, tokens: int, environment: dict[str, str] | None = None) -> Subject:
    """Return `mlxinfer bench`: decoding after `prompt` tokens."""
    command = [sys.executable, "-m", "mlxinfer", "bench", model, "--json", "--prefill", "none", "--repeat", "1"]
    command += ["--batch", str(streams), "--decode-depth", str(prompt), "--steps", str(tokens), "--max-seconds", "0"]
    return Subject("mlxinfer", command, _decode_speed, environment or {})


def mlx_lm(model: str, streams: int, prompt: int, tokens: int) -> Subject:
    """Return mlx-lm's own benchmark: decoding after a prompt of `prompt` tokens. It runs once before the run that counts."""
    command = [sys.executable, "-m", "mlx_lm", "benchmark", "--model", model, "-p", str(prompt), "-g", str(tokens)]
    return Subject("mlx-lm", [*command, "-b", str(streams), "-n", "1"], _generation_speed)


def _decode_speed(output: str) -> float:
    rows = [row for row in json.loads(output)["rows"] if row.get("tokens_per_s") and row["name"].startswith("decode")]
    if not rows:
        raise ValueError("mlxinfer bench measured no decoding")
    return float(rows[0]["tokens_per_s"]["median"])


def _generation_speed(output: str) -> float:
    found = re.findall(r"generation_tps=([\d.]+)", output)
    if not found:
        raise ValueError("mlx_lm benchmark printed no generation_tps")
    return float(found[-1])


def table(groups: Sequence[tuple[str, Sequence[Subject]]]) -> str:
    """Return tokens/s of all rounds, their medians, and the median ratio to the last subject of the group, round by round."""
    rows = ["| | | median tokens/s | times the last | rounds |", "| --- | --- | ---: | ---: | --- |"]
    for title, subjects in groups:
        for subject in subjects:
            pairs = list(zip(subject.speeds, subjects[-1].speeds))
            if not pairs:
                continue
            ratio = statistics.median(one / other for one, other in pairs)
            speeds = ", ".join(f"{speed:.1f}" for speed in subject.speeds)
            rows.append(f"| {title} | {subject.name} | {statistics.median(subject.speeds):.1f} | {ratio:.2f} | {speeds} |")
    return "\n".join(rows)


def in_turns(groups: Sequence[tuple[str, Sequence[Subject]]], rounds: int) -> int:
    """Run all subjects once per round, in the other order every second round. Return the number of runs that failed."""
    failed = 0
    for number in range(rounds):
        for _, subjects in groups:
            for subject in subjects if number % 2 == 0 else reversed(subjects):
                try:
                    subject.measure()
                except (ValueError, subprocess.SubprocessError, OSError) as error:
                    failed += 1
                    print(f"round {number + 1}: {error}", flush=True)
        print(f"after round {number + 1} of {rounds}\n\n{table(groups)}\n", flush=True)
    return failed


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code: 1 if a run failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mac_report.turns")
    parser.add_argument("study", choices=["mlx-lm", "variables"])
    parser.add_argument("model")
    parser.add_argument("variables", nargs="*", metavar="NAME=VALUE")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=128)
    given = parser.parse_args(arguments)
    work = given.prompt, given.tokens
    groups: list[tuple[str, list[Subject]]] = []
    for streams in given.streams:
        title = f"{streams} stream{'s' * (streams > 1)}"
        if given.study == "mlx-lm":
            groups.append((title, [ours(given.model, streams, *work), mlx_lm(given.model, streams, *work)]))
            continue
        subjects = [ours(given.model, streams, *work, dict([pair.split("=", 1)])) for pair in given.variables]
        for subject, pair in zip(subjects, given.variables):
            subject.name = pair
        groups.append((title, subjects))
    failed = in_turns(groups, given.rounds)
    ratios = [f"{title} {statistics.median(a / b for a, b in zip(s[0].speeds, s[-1].speeds)):.2f}" for title, s in groups if _paired(s)]
    print(f"{groups[0][1][0].name} / {groups[0][1][-1].name}: {', '.join(ratios) or 'not measured'}")
    return int(failed > 0)


def _paired(subjects: Sequence[Subject]) -> bool:
    return bool(subjects[0].speeds and subjects[-1].speeds)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
