"""The walk of a decode step through the code: files entered, Python calls, and switches from one file to another.

    python -m benchmarks.walk [MODEL]

A stream of one answer is followed with `sys.setprofile`, after it has been running for a while. Only calls of this project's own
functions count, those of properties and comprehensions included; files are those under `mlxinfer/`, the command's own loop excluded.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import FrameType

import mlxinfer
from mlxinfer import LLM, SamplingParams

WARM_STEPS, STEPS = 80, 100
_ROOT = str(Path(mlxinfer.__file__).parent)
_PROMPT = "The capital of France is"


@dataclass(slots=True)
class Walk:
    """What one step went through."""

    calls: Counter[str] = field(default_factory=Counter)
    """Calls by function, as `file:function`."""
    switches: int = 0
    """Calls that led from one file into another."""
    files: Counter[str] = field(default_factory=Counter)
    """Calls by file."""

    def note(self, frame: FrameType, event: str, arg: object) -> None:
        """Pass this to `sys.setprofile`."""
        if event != "call":
            return
        path = frame.f_code.co_filename
        if not path.startswith(_ROOT):
            return
        name = path[len(_ROOT) + 1 :]
        self.calls[f"{name}:{frame.f_code.co_name}"] += 1
        self.files[name] += 1
        caller = frame.f_back
        self.switches += caller is not None and caller.f_code.co_filename.startswith(_ROOT) and caller.f_code.co_filename != path


def walks(model: str, steps: int = STEPS, temperature: float = 0.0) -> list[Walk]:
    """One walk for each of `steps` tokens of an answer, a greedy one by default."""
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=WARM_STEPS + steps + 8, ignore_eos=True)
    found: list[Walk] = []
    with LLM(model) as llm:
        stream = llm.stream(_PROMPT, params)
        for _ in range(WARM_STEPS):
            next(stream)
        for _ in range(steps):
            walk = Walk()
            sys.setprofile(walk.note)
            try:
                next(stream)
            finally:
                sys.setprofile(None)
            found.append(walk)
        stream.close()
    return found


def report(found: list[Walk], *, detail: bool = False) -> str:
    """Medians over the steps, and with `detail` every function of the step that is in the middle."""
    typical = sorted(found, key=lambda walk: walk.calls.total())[len(found) // 2]
    lines = [
        f"files entered {median(len(walk.files) for walk in found):g}, calls {median(walk.calls.total() for walk in found):g}, "
        f"switches between files {median(walk.switches for walk in found):g} (medians of {len(found)} decode steps)"
    ]
    lines += [f"  {count:4} {name}" for name, count in sorted(typical.files.items())]
    if detail:
        lines += [f"  {count:4} {name}" for name, count in sorted(typical.calls.items())]
    return "\n".join(lines)


if __name__ == "__main__":
    arguments = [each for each in sys.argv[1:] if not each.startswith("-")]
    print(report(walks(arguments[0] if arguments else "smollm2"), detail="--detail" in sys.argv))
