from __future__ import annotations

import io
from pathlib import Path

import pytest
from support.processes.optional import needs

from benchmarks.common.report import document, notes, table
from benchmarks.common.samples import Results, Sample, Spread, Writer, read

WORKS = {"decode at 0": (100.0, 50.0), "decode at 0, 8 together": (300.0, 100.0), "prefill 512": (400.0, 200.0)}
ABOUT = {
    "processor": "A processor", "threads": 2, "system": "Linux x86_64", "date": "today", "python": "3.12",
    "packages": {"mlx": "1"}, "commit": "abc",
    "models": {"m": {"file": "m.gguf", "left_out": {"mlx-lm": "not installed"}, "engines": {}}},
}  # fmt: skip


def samples() -> list[Sample]:
    found = []
    for number, noise in ((1, 1.0), (2, 0.5), (3, 2.0)):
        for work, kind in (("read", 10_000.0), ("multiply-add", 20_000.0)):
            found.append(Sample("m", work, "machine", number, 0, 0, 0, kind * noise, "/s"))
        for work, speeds in WORKS.items():
            for engine, speed in zip(("mlxinfer", "llama.cpp"), speeds, strict=True):
                length, streams = (512, 1) if "prefill" in work else (0, 8 if "8" in work else 1)
                value = speed * noise
                found.append(Sample("m", work, engine, number, length, streams, 64, value, "tokens/s", bytes=50.0, operations=1000.0))
        for engine, seconds, size in (("mlxinfer", 1.0, 3e8), ("llama.cpp", 0.5, 2e8)):
            found.append(Sample("m", "load to first token", engine, number, 0, 1, 0, seconds / noise, "s"))
            found.append(Sample("m", "peak memory", engine, number, 512, 1, 32, size, "bytes"))
    return found


def test_a_file_holds_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    with path.open("w", newline="") as file:
        writer = Writer(file)
        for sample in samples():
            writer.add(sample)
    assert read(path) == samples()
    assert path.read_text().startswith("model,work,engine,round,")


def test_each_sample_is_written_at_once() -> None:
    class File(io.StringIO):
        flushes = 0

        def flush(self) -> None:
            self.flushes += 1

    file = File()
    writer = Writer(file)
    writer.add(samples()[0])
    assert file.flushes == 1
    assert len(file.getvalue().splitlines()) == 2


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "model,work\n"])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(ValueError, match="the columns must be model, work"):
        read(tmp_path / "x.csv")


def test_ratios_are_of_the_same_round_and_above_one_where_ours_is_better() -> None:
    results = Results("m", samples())
    assert results.spread("decode at 0", "mlxinfer") == Spread(100.0, 50.0, 200.0)
    # Load that slows a whole round does not change its ratio.
    assert results.better(("decode at 0", "mlxinfer"), ("decode at 0", "llama.cpp")) == Spread(2.0, 2.0, 2.0)
    assert results.better(("decode at 0, 8 together", "mlxinfer"), ("decode at 0", "mlxinfer")) == Spread(3.0, 3.0, 3.0)
    assert results.better(("load to first token", "mlxinfer"), ("load to first token", "llama.cpp")) == Spread(0.5, 0.5, 0.5)
    assert results.better(("peak memory", "llama.cpp"), ("peak memory", "mlxinfer")) == Spread(1.5, 1.5, 1.5)
    assert results.better(("decode at 0", "mlxinfer"), ("decode at 0", "nobody")) is None


def test_shares_of_the_machine() -> None:
    results = Results("m", samples())
    assert results.share("decode at 0", "mlxinfer") == Spread(*[pytest.approx(50 * 100 / 10_000)] * 3)
    assert results.share("decode at 0, 8 together", "mlxinfer") == Spread(*[pytest.approx(50 * 300 / 8 / 10_000)] * 3)
    assert results.share("prefill 512", "mlxinfer") == Spread(*[pytest.approx(1000 * 400 / 512 / 20_000)] * 3)
    assert results.share("peak memory", "mlxinfer") is None


def test_a_shorter_length_is_never_silent() -> None:
    short = [Sample("m", "prefill 512", "mlx-lm", 1, 128, 1, 0, 8.0, "tokens/s")]
    results = Results("m", samples() + short)
    assert "8.00 (8.00–8.00) at 128" in table(results)
    assert any("minutes" in note for note in notes(results))
    assert not any("minutes" in note for note in notes(Results("m", samples())))


def test_the_document_tells_what_went_wrong() -> None:
    described = ABOUT["models"]["m"] | {"engines": {"mlxinfer": {"first_token": " Paris"}, "llama.cpp": {"first_token": " London"}}}
    busy = Sample("m", "decode at 0", "mlxinfer", 4, 0, 1, 64, 1.0, "tokens/s", others=0.25, idle_cpu_s=9.0)
    text = document([Results("m", [*samples(), busy])], ABOUT | {"models": {"m": described}})
    assert "mlx-lm is left out: not installed" in text
    assert "' Paris'" in text
    assert "used 9.0 s of processor time while others were measured" in text
    assert f"in 1 of {len(samples()) + 1} measurements others had more than 5% of its processors (at most 25%)" in text
    assert "A processor, 2 threads" in text
    assert "8 sequences together get 3.00" in text


@pytest.mark.parametrize("kind", ["svg", pytest.param("png", marks=pytest.mark.long)])
def test_the_picture(tmp_path: Path, kind: str) -> None:
    needs("matplotlib")
    from benchmarks.common.picture import draw

    short = [Sample("n", "prefill 512", "mlx-lm", 1, 128, 1, 0, 8.0, "tokens/s")]
    path = tmp_path / f"x.{kind}"
    draw([Results("m", samples()), Results("n", [*(s for s in samples()), *short])], "llama.cpp", path, "a caption")
    assert path.stat().st_size > 5000
