"""The files and calls that loading a model, a whole request and a decode step pass through.

    python -m benchmarks.walk [MODEL] [--detail]

`sys.setprofile` follows the calling thread. Only this project's own functions count, including properties and comprehensions. Files are
those under mlxinfer/.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import FrameType

import mlxinfer
from mlxinfer import LLM, SamplingParams

WARM_STEPS, STEPS = 300, 100
"""Until a class has 256 objects, `mlxinfer.util.dataclass` makes each with additional calls."""
REQUEST_TOKENS = 24
_ROOT = str(Path(mlxinfer.__file__).parent)
_PROMPT = "The capital of France is"


@dataclass(slots=True)
class Walk:
    """Calls of this project's functions."""

    calls: Counter[str] = field(default_factory=Counter)
    """Calls by function, as `file:function`."""
    switches: int = 0
    """Calls from one file into another."""
    files: Counter[str] = field(default_factory=Counter)
    """Calls by file."""

    def note(self, frame: FrameType, event: str, arg: object) -> None:
        """Count a call; a callback of `sys.setprofile`."""
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


@contextmanager
def following() -> Iterator[Walk]:
    """Yield a walk that counts the calls of the block."""
    walk = Walk()
    sys.setprofile(walk.note)
    try:
        yield walk
    finally:
        sys.setprofile(None)


def step_walks(model: str, steps: int = STEPS, temperature: float = 0.0, vision: str = "auto") -> list[Walk]:
    """Follow `steps` decode steps of one answer, after `WARM_STEPS` others. `vision` is `EngineArgs.vision`."""
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=WARM_STEPS + steps + 8, ignore_eos=True)
    walks: list[Walk] = []
    with LLM(model, vision=vision) as llm:
        stream = llm.stream(_PROMPT, params)
        for _ in range(WARM_STEPS):
            next(stream)
        for _ in range(steps):
            with following() as walk:
                next(stream)
            walks.append(walk)
        stream.close()
    return walks


def load_and_request_walks(model: str) -> tuple[Walk, Walk]:
    """Follow loading a model for the second time in this process, and its second request.

    The request has token ids as its prompt, and `REQUEST_TOKENS` greedy tokens as its answer. First times are left out, because these
    also import modules and fill caches.
    """
    params = SamplingParams(temperature=0, max_tokens=REQUEST_TOKENS, ignore_eos=True)
    LLM(model).close()
    with following() as load:
        llm = LLM(model)
    with llm:
        prompt = llm.tokenizer.encode(_PROMPT)
        llm.generate([prompt], params)
        with following() as request:
            llm.generate([prompt], params)
    return load, request


def report(walks: list[Walk], *, detail: bool = False) -> str:
    """Medians over `walks`, then the files of the walk in the middle; with `detail` its functions too."""
    typical = sorted(walks, key=lambda walk: walk.calls.total())[len(walks) // 2]
    lines = [
        f"files {median(len(walk.files) for walk in walks):g}, calls {median(walk.calls.total() for walk in walks):g}, "
        f"switches between files {median(walk.switches for walk in walks):g}"
    ]
    lines += [f"  {count:4} {name}" for name, count in sorted(typical.files.items())]
    if detail:
        lines += [f"  {count:4} {name}" for name, count in sorted(typical.calls.items())]
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    model = next((each for each in arguments if not each.startswith("-")), "smollm2")
    detail = "--detail" in arguments
    load, request = load_and_request_walks(model)
    print("Loading the model:", report([load], detail=detail))
    print(f"A request of {REQUEST_TOKENS} tokens:", report([request], detail=detail))
    print(f"A decode step (medians of {STEPS}):", report(step_walks(model), detail=detail))


if __name__ == "__main__":
    main(sys.argv[1:])
