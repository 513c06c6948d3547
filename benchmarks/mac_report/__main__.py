"""`python -m benchmarks.mac_report`: runs all steps, and writes the report after each of them."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .document import write
from .running import ROOT, Interrupted, Outcome, Step, run
from .steps import Plan, steps

FILE = ROOT / "mac-report.md"
_PLAN = Plan()


def report(todo: Sequence[Step], file: Path) -> list[Outcome]:
    """Run the steps, and replace the file after each. A step that fails stops no other, except those that need it; Ctrl-C stops all."""
    outcomes: list[Outcome] = []
    try:
        for number, step in enumerate(todo, 1):
            failed = next((o for o in outcomes if o.step.title == step.needs and o.status != "ok"), None)
            if failed is not None:
                outcomes.append(Outcome(step, f"left out: {failed.step.title} failed"))
                continue
            print(f"[{number}/{len(todo)}] {step.title} ... ", end="", flush=True)
            outcomes.append(run(step))
            print(f"{outcomes[-1].status}, {outcomes[-1].seconds:.1f} s", flush=True)
            write(file, outcomes)
    except Interrupted as interrupted:
        outcomes.append(interrupted.outcome)
        print("interrupted")
    except KeyboardInterrupt:
        print("interrupted")
    write(file, outcomes)
    return outcomes


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code: 0 if the report is written, also of steps that failed."""
    parser = argparse.ArgumentParser(prog="make mac-report", description="Write a report about this Mac: ten to twenty-five minutes.")
    parser.add_argument("--output", type=Path, default=FILE, metavar="FILE")
    parser.add_argument("--environment", type=Path, default=_PLAN.environment, metavar="DIR", help="virtual environment that make creates")
    parser.add_argument("--small", default=_PLAN.small, metavar="MODEL", help="instead of SmolLM2")
    parser.add_argument("--model", default=_PLAN.model, help="for the comparison with mlx-lm")
    parser.add_argument("--quick", action="store_true", help="a few tokens, to try the report itself")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as work:
        plan = Plan(given.environment.absolute(), given.small, given.model, Path(work).resolve(), given.quick)
        print("This may take ten to twenty-five minutes. Leave the Mac alone and plugged in. Ctrl-C keeps what there is.", flush=True)
        outcomes = report(steps(plan), given.output)
    failed = [outcome.step.title for outcome in outcomes if outcome.status != "ok"]
    print(f"{len(outcomes) - len(failed)} of {len(outcomes)} steps ok" + (f"; not: {', '.join(failed)}" if failed else ""))
    print(f"Written to {given.output}. Read it before you share it: it should have no names and no paths of yours.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
