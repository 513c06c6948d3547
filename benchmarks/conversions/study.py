"""The points of the study, each measured in a process of its own and kept as one line of JSON."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from mlxinfer.evaluation.measure import Reading, compare

from .ways import Way

POSITIONS = 4096
Result = dict[str, Any]


def slug(model: str, key: str) -> str:
    """What the files of a point are called."""
    return re.sub(r"[^A-Za-z0-9_.]+", "-", f"{model}.{key}")


def points_in(room: Path) -> Path:
    """The folder of points, a line of JSON in a file for each."""
    return room / "points"


def merged(kept: list[Result], room: Path) -> list[Result]:
    """Stored results, and the points of a room, which replace those of the same name."""
    found = {(each["model"], each["way"]): each for each in kept}
    for file in sorted(points_in(room).glob("*.json")):
        each = json.loads(file.read_text(encoding="utf-8"))
        found[each["model"], each["way"]] = each
    return list(found.values())


def write(results: list[Result], file: Path) -> None:
    """A line for each result."""
    file.write_text("[\n" + ",\n".join(json.dumps(each) for each in results) + "\n]\n", encoding="utf-8")


def read_teacher(model: Path, room: Path, positions: int = POSITIONS) -> None:
    """What the source says of the text, kept for all points."""
    compare(model, [], Reading(positions=positions, cache=room / "teachers"))


def measure(name: str, model: Path, way: Way, room: Path, positions: int = POSITIONS) -> Result:
    """Make a model in this way, measure it, and keep the result. What was made before an interruption is used. Raises what the way does."""
    target, begin = room / slug(name, way.key), perf_counter()
    noted = target.with_name(f"{target.name}.seconds")  # names have dots
    if not noted.exists():
        bpw = way.make(model, target)
        noted.write_text(json.dumps([perf_counter() - begin, bpw]), encoding="utf-8")
    seconds, bpw = json.loads(noted.read_text(encoding="utf-8"))
    found = compare(model, [target], Reading(positions=positions, cache=room / "teachers"))
    figures, scores = found.students[0], found.scores[0]
    assert scores.kl is not None
    means = [float(scores.kl[scores.window == window].mean()) for window in np.unique(scores.window)]
    result = {
        "model": name,
        "engine": way.engine,
        "way": way.title(model),
        "bpw": round(bpw or figures.bpw, 4),
        "kl_mean": figures.kl_mean,
        "kl_stderr": figures.kl_stderr,
        "kl_p99": figures.kl_p99,
        "top1": figures.top1,
        "top1_stderr": figures.top1_stderr,
        "ppl_ratio": figures.ppl_ratio,
        "positions": figures.positions,
        "seconds": round(seconds, 1),
        "kl_of_windows": [round(mean, 6) for mean in means],
        "expected_kl": _expected(target),
    }
    made = points_in(room) / f"{slug(name, way.key)}.making"
    made.parent.mkdir(parents=True, exist_ok=True)
    made.write_text(json.dumps(result) + "\n", encoding="utf-8")
    made.rename(made.with_suffix(".json"))
    shutil.rmtree(target, ignore_errors=True)
    noted.unlink()
    return result


def _expected(target: Path) -> float | None:
    """The KL divergence that the plan of a conversion expected."""
    plan = target / "quantization_plan.json"
    found = json.loads(plan.read_text(encoding="utf-8")).get("predicted_kl") if plan.exists() else None
    return None if found is None else float(found)
