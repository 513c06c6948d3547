"""`python -m benchmarks kv-quality`."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import click

from ..batch.texts import text
from ..common import options


@click.command("kv-quality")
@options.models(*options.DEFAULT_MODELS)
@click.option("--context", "contexts", type=click.IntRange(128), multiple=True, default=(1024,), show_default=True,
              help="Tokens of text; repeatable.")  # fmt: skip
@click.option("--cache", "caches", multiple=True, help="Only these, such as 4; repeatable.  [default: all]")
def kv_quality(models: dict[str, Path], contexts: tuple[int, ...], caches: tuple[str, ...]) -> None:
    """Measure the loss of quantized caches. Adds to results/kv/kv_quality.csv, and writes its table."""
    from mlxinfer.loading.load import load_tokenizer, open_checkpoint

    from .quality import measure, read, store, table

    stored = options.RESULTS / "kv" / "kv_quality.csv"
    for name, path in models.items():
        with closing(open_checkpoint(path)) as checkpoint:
            ids = load_tokenizer(checkpoint).encode(text())
        for context in contexts:
            for row in measure(name, path, ids[:context], caches, options.tell):
                store(row, stored)
    page = table(read(stored))
    stored.with_suffix(".md").write_text(page, encoding="utf-8")
    click.echo(page)
