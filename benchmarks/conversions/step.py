"""One step of the study: `python -m benchmarks.conversions.step ROOM MODEL FILE STEP`; STEP is the name of a way or of a preparation."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from .jobs import Job
from .llama_cpp import keep_importance
from .source import PIECES, source, write_samples, writer_of
from .study import measure, points_in, read_teacher, slug
from .ways import ways


def jobs(models: dict[str, Path], room: Path, chosen: tuple[str, ...], pieces: int = PIECES) -> list[Job]:
    """What is missing of the study, in order of how much it tells: all models at once. Calibrated with so many pieces of samples."""
    missing = [
        (name, way)
        for way in ways()
        for name in models
        if (not chosen or way.key.startswith(chosen)) and not (points_in(room) / f"{slug(name, way.key)}.json").exists()
    ]
    found: list[Job] = []
    names = dict.fromkeys(name for name, _ in missing)
    for name in names:
        read = [way for each, way in missing if writer_of(each, names) == name or each == name]
        wanted = pieces if any(way.pieces for way in read) else 0
        found += preparations(room, name, models[name], wanted, writer_of(name, names))
    for name, way in missing:
        needs = ("teacher", *(["importance"] if way.pieces else []))
        found.append(job(room, name, models[name], way.key, needs))
    return found


def preparations(room: Path, name: str, path: Path, wanted: int, writer: str) -> list[Job]:
    """What has to be there before anything of a model is measured: `wanted` pieces of samples, which `writer` writes."""
    pieces = tuple(f"samples {piece}" for piece in range(wanted))
    first = [job(room, name, path, "source"), job(room, name, path, "teacher", ("source",))]
    if not wanted:
        return first
    texts = [job(room, name, path, piece, ("source",)) for piece in pieces]
    if writer != name:
        texts = [replace(each, needs=(*each.needs, f"{writer} {piece}")) for each, piece in zip(texts, pieces, strict=True)]
    return [*first, *texts, job(room, name, path, "importance", pieces)]


def job(room: Path, name: str, path: Path, step: str, needs: tuple[str, ...] = ()) -> Job:
    """A process for one step."""
    command = (sys.executable, "-m", "benchmarks.conversions.step", str(room), name, str(path), step)
    return Job(f"{name} {step}", command, tuple(f"{name} {each}" for each in dict.fromkeys(needs)))


def main(room: Path, name: str, path: Path, step: str) -> None:
    """Do it. Raises what it raises, StopIteration for a step that there is not."""
    room.mkdir(parents=True, exist_ok=True)
    model = source(name, path, room)
    if step == "teacher":
        read_teacher(model, room)
    elif step.startswith("samples "):
        write_samples(model, int(step.split()[1]))
    elif step == "importance":
        keep_importance(model)
    elif step != "source":
        found = measure(name, model, next(way for way in ways() if way.key == step), room)
        print(f"{found['bpw']:.2f} bpw, KL {found['kl_mean']:.4f} +- {found['kl_stderr'] or 0.0:.4f}, {found['seconds']} s")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4])
