"""Peak memory of a conversion: a synthetic bfloat16 Llama of several GB is written, and quantized in a process of its own.

    python -m benchmarks.convert_rss --gigabytes 8 --bits 4 --encoder gptq

GPTQ reads random tokens, so that nothing has to be sampled first.

Measured with `encoder="minmax"` on Linux x86-64 (2 busy cores, MLX on its CPU backend), 4 bits in groups of 64: source 6.29 GB, largest
tensor 1051 MB, peak RSS 485 MB (46 MB of it before the conversion), 106 s, 1.77 GB written. It does not grow with the source.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
import mlx.core as mx

from mlxinfer.convert.encode.affine import ENCODERS
from mlxinfer.convert.plan.weight_map import Part
from mlxinfer.convert.write.writer import Writer

CONFIG = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu",
    "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip
CHUNK = 1 << 24

CONVERT = """
import os, resource, sys, threading
from mlxinfer.convert import convert
from mlxinfer.convert.calibrate.texts import random_ids

def peak():
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))

def tell(done, total):
    global share
    share = done / total

def end():
    print(before, peak(), share, 0, 0, flush=True)
    os._exit(0)

before, share = peak(), 0.0
source, target, bits, encoder, memory, tokens, seconds = sys.argv[1:]
texts = random_ids(128256, int(tokens)) if encoder == "gptq" else None
if float(seconds):
    timer = threading.Timer(float(seconds), end)
    timer.daemon = True
    timer.start()
report = convert(
    source, target, bits=int(bits), measure=False, encoder=encoder, calibration=texts, max_memory=float(memory) or None, weighing=tell
)
print(before, peak(), 1.0, report.nbytes, report.bits_per_weight)
"""


def tensors(layers: int) -> dict[str, tuple[int, ...]]:
    hidden, inner, kv, vocab = 4096, 14336, 1024, 128256
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for layer in range(layers):
        name = f"model.layers.{layer}"
        shapes |= {f"{name}.self_attn.{p}_proj.weight": (rows, hidden) for p, rows in (("q", hidden), ("k", kv), ("v", kv), ("o", hidden))}
        shapes |= {f"{name}.mlp.{p}_proj.weight": (inner, hidden) for p in ("gate", "up")}
        shapes[f"{name}.mlp.down_proj.weight"] = (hidden, inner)
        shapes |= {f"{name}.{p}_layernorm.weight": (hidden,) for p in ("input", "post_attention")}
    return shapes


def sizes(directory: Path) -> tuple[int, int]:
    """Bytes of all tensors of a source, and of the largest."""
    layers = json.loads((directory / "config.json").read_text())["num_hidden_layers"]
    found = [2 * math.prod(shape) for shape in tensors(layers).values()]
    return sum(found), max(found)


def write_source(directory: Path, gigabytes: float) -> None:
    """A checkpoint of this size at least."""
    layers = 1
    while 2 * sum(map(math.prod, tensors(layers).values())) < gigabytes * 1e9:
        layers += 1
    parts = [Part(name, "BF16", shape, 2 * math.prod(shape)) for name, shape in tensors(layers).items()]
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))
    writer = Writer(directory, [[part] for part in parts], shard_bytes=10**9)
    values = (mx.random.normal((CHUNK,)) * 0.02).astype(mx.bfloat16)
    for part in parts:
        for start in range(0, part.nbytes // 2, CHUNK):
            writer.append(part, values[: min(CHUNK, part.nbytes // 2 - start)])
    writer.finish(sum(part.nbytes // 2 for part in parts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=6.0)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--encoder", choices=ENCODERS, default="fit")
    parser.add_argument("--max-memory", type=float, default=0, help="GB, as `convert` takes it; 0 for what it takes by default")
    parser.add_argument("--tokens", type=int, default=4096, help="random ones, which GPTQ reads")
    parser.add_argument("--seconds", type=float, default=0, help="end after so long, with what has been read until then; 0 for all")
    parser.add_argument("--folder", help="where to write, twice that size; the source stays there, and is used again")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        source, out = Path(options.folder or folder) / f"source-{options.gigabytes:g}", Path(folder) / "out"
        if not source.exists():
            made = Path(folder) / "making"
            write_source(made, options.gigabytes)
            made.rename(source)
        total, largest = sizes(source)
        click.echo(f"source {total / 1e9:.2f} GB, largest tensor {largest / 1e6:.0f} MB")
        start = time.perf_counter()
        settings = (options.bits, options.encoder, options.max_memory, options.tokens, options.seconds)
        command = [sys.executable, "-c", CONVERT, str(source), str(out), *map(str, settings)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        seconds = time.perf_counter() - start
        before, peak, read, written, bits = map(float, done.stdout.split())
        click.echo(f"peak RSS {peak / 1e6:.0f} MB ({before / 1e6:.0f} MB of it before the conversion), {seconds:.0f} s")
        if not bits:
            click.echo(f"ended with {read:.0%} of the source read")
        else:
            click.echo(f"{written / 1e9:.2f} GB written, {bits:.3f} bits per weight")


if __name__ == "__main__":
    main()
