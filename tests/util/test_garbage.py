"""Objects made while the garbage collector is disabled do not start a collection once it is enabled again."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from mlxinfer.util.garbage import no_garbage_collection


class _Loop:
    def __init__(self) -> None:
        self.own = self


@pytest.fixture
def thawed() -> Iterator[None]:
    """Nothing is frozen, as in any other process than that of these tests."""
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


@pytest.mark.usefixtures("thawed")
def test_what_was_made_is_old_at_once() -> None:
    with no_garbage_collection():
        made: list[list[int]] = [[] for _ in range(5000)]
    old = {id(each) for each in gc.get_objects(generation=2)}
    assert gc.isenabled()
    assert old.issuperset(map(id, made))


@pytest.mark.usefixtures("thawed")
def test_garbage_among_it_is_still_found() -> None:
    with no_garbage_collection():
        lost = weakref.ref(_Loop())
    assert lost() is not None
    gc.collect()
    assert lost() is None


def test_what_a_program_has_frozen_stays_so() -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    with no_garbage_collection():
        pass
    assert gc.get_freeze_count() >= frozen * 0.99


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with no_garbage_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
