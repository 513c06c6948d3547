"""Adapters of a model whose blocks are divided among machines by heads and columns: each machine reads the part that its share needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..errors import AdapterError
from ..models.pipeline_stage import Stage
from ..models.tensor_parallel import BY_COLUMNS, BY_ROWS
from .update import Adapter, Factors, Update


def of_share(adapters: Sequence[Adapter], part: Stage) -> tuple[Adapter, ...]:
    """The same for one share of every block. `b` is cut by rows where the matrix is, and `a` by columns, so that shares of an update sum up
    to it as shares of the product do. The adapters must fit the whole model. Raises `AdapterError` for magnitudes of matrices cut by
    columns: they need the length of whole rows."""
    return tuple([replace(each, updates={key: _cut(each, update, part) for key, update in each.updates.items()}) for each in adapters])


def _cut(adapter: Adapter, update: Update, part: Stage) -> Update:
    name, (out, into) = update.key.rpartition(".")[2], update.shape
    if name in BY_ROWS:
        return replace(update, shape=(out // part.shares, into), read=_rows(update.read, part, out // part.shares))
    assert name in BY_COLUMNS  # the families that can be divided have no other projections
    if update.has_magnitude:
        raise AdapterError(
            f"{adapter.path}: the adapter has magnitudes (DoRA) for {name}, whose rows --split tensor divides: leave that out, to divide "
            "the model by layers"
        )
    return replace(update, shape=(out, into // part.shares), read=_columns(update.read, part, into // part.shares))


def _rows(read: Callable[[], Factors], part: Stage, count: int) -> Callable[[], Factors]:
    own = slice(part.share * count, (part.share + 1) * count)

    def cut() -> Factors:
        whole = read()
        return Factors(whole.a, whole.b[own], None if whole.magnitude is None else whole.magnitude[own])

    return cut


def _columns(read: Callable[[], Factors], part: Stage, count: int) -> Callable[[], Factors]:
    own = slice(part.share * count, (part.share + 1) * count)

    def cut() -> Factors:
        whole = read()
        return Factors(whole.a[:, own], whole.b)

    return cut
