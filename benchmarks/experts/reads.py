"""Speed of reading experts from a disk: ways to read, threads, and reads at once."""

from __future__ import annotations

import resource
import time
from pathlib import Path

import click
import mlx.core as mx
import numpy as np

from mlxinfer.expert_offload import ExpertFile, ExpertFileWriter, ExpertReader, experts_folder
from mlxinfer.expert_offload.file_format import LayerRecord, expert_bytes
from mlxinfer.expert_offload.pool import aligned
from mlxinfer.expert_offload.reader import ExpertRead, ReadWay

SOURCE = {"benchmark": "expert-reads"}
_SLOTS = 16


def written(path: Path, record: int, experts: int) -> ExpertFile:
    """Return a file of random bytes with this many experts of `record` bytes each."""
    found = ExpertFile.open(path, {**SOURCE, "record": record, "experts": experts})
    if found is not None:
        return found
    rng = np.random.default_rng(0)
    with ExpertFileWriter(path, {**SOURCE, "record": record, "experts": experts}, record * experts) as writer:
        for layer in range(8):
            if str(layer) not in writer.keys:
                writer.add(str(layer), {"a": rng.integers(0, 256, (experts // 8, record), np.uint8)})
        return writer.finish()


class ReadTrial:
    """Reads random experts of a file into slots."""

    def __init__(self, file: ExpertFile, way: ReadWay, threads: int) -> None:
        self.layers = list(file.layers.values())
        self.reader = ExpertReader(file, threads)
        if self.reader.way != ReadWay.BUFFERED or way == ReadWay.BUFFERED:
            self.reader.way = way
        self.slots = expert_bytes(aligned((_SLOTS, self.layers[0].expert_bytes), mx.uint8))
        self.rng = np.random.default_rng(1)

    def _read(self, slot: int) -> ExpertRead:
        layer: LayerRecord = self.layers[self.rng.integers(len(self.layers))]
        expert = int(self.rng.integers(layer.experts))
        return ExpertRead(layer.offset + expert * layer.stride, layer.expert_bytes, layer.stride, [self.slots[slot]])

    def run(self, batches: int, at_once: int) -> tuple[float, float]:
        """Read `batches` times `at_once` experts, waiting for each batch. Returns (bytes per second, CPU seconds per byte)."""
        begun, used = time.perf_counter(), _cpu_seconds()
        for _ in range(batches):
            reads = [self._read(slot) for slot in range(at_once)]
            self.reader.submit(reads, demanded=True, helped=True)
            self.reader.wait(reads)
            assert all(read.is_whole for read in reads)
        nbytes = batches * at_once * self.layers[0].expert_bytes
        return nbytes / (time.perf_counter() - begun), (_cpu_seconds() - used) / nbytes


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


@click.command("expert-reads")
@click.option("--record-kb", default="2048", show_default=True, help="Sizes of an expert, separated by commas.")
@click.option("--experts", default=1024, show_default=True)
@click.option("--folder", type=click.Path(path_type=Path), help="Folder on the disk to measure; by default that of files of experts.")
@click.option("--rounds", default=3, show_default=True, help="Rounds in alternating order; the table has the best of each.")
@click.option("--mb", default=256, show_default=True, help="Megabytes of a measurement.")
def expert_reads(record_kb: str, experts: int, folder: Path | None, rounds: int, mb: int) -> None:
    """Measure how fast experts are read from a disk."""
    folder = folder or experts_folder()
    print("| expert | way | threads | reads at once | GB/s | CPU s/GB |\n| --- | --- | --- | --- | --- | --- |")
    for record in (int(each) << 10 for each in record_kb.split(",")):
        path = folder / f"benchmark-{record}.experts"
        found: dict[tuple[ReadWay, int, int], list[tuple[float, float]]] = {}
        for _ in range(rounds):
            for way in ReadWay:
                for threads, at_once in ((1, 1), (2, 2), (2, 8), (4, 4), (4, 8), (8, 8)):
                    file = written(path, record, experts)
                    trial = ReadTrial(file, way, threads)
                    key = (trial.reader.way, threads, at_once)
                    found.setdefault(key, []).append(trial.run(max((mb << 20) // record // at_once, 1), at_once))
                    trial.reader.close()
                    file.close()
        for (way, threads, at_once), results in found.items():
            rate, cpu = max(rate for rate, _ in results), min(cpu for _, cpu in results)
            print(f"| {record >> 10} KB | {way.name.lower()} | {threads} | {at_once} | {rate / 1e9:.2f} | {cpu * 1e9:.2f} |")
        path.unlink()
        path.with_suffix(".checked").unlink()
