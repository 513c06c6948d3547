"""Page bookkeeping: ids are never handed out twice, and all come back."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mlxinfer.cache.base import PAGE
from mlxinfer.cache.pages import PageAllocator, PageTable, pages_for


class Allocation(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.allocator = PageAllocator(20)
        self.held: list[list[int]] = []

    @rule(count=st.integers(0, 6))
    def allocate(self, count):
        if count <= self.allocator.free:
            self.held.append(self.allocator.allocate(count))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data):
        pages = data.draw(st.sampled_from(self.held))
        self.allocator.share(pages)
        self.held.append(list(pages))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        index = data.draw(st.integers(0, len(self.held) - 1))
        self.allocator.release(self.held.pop(index))

    @invariant()
    def free_is_what_nobody_holds(self):
        used = {page for pages in self.held for page in pages}
        assert self.allocator.free == 20 - len(used)
        assert all(0 <= page < self.allocator.extent <= 20 for page in used)


TestAllocation = Allocation.TestCase


def test_new_pages_are_not_held_by_anyone():
    allocator = PageAllocator(8)
    first = allocator.allocate(3)
    allocator.share(first)
    allocator.release(first)
    assert not set(first) & set(allocator.allocate(5))


def test_lone_sequence_gets_consecutive_pages():
    allocator = PageAllocator(8)
    assert allocator.allocate(2) + allocator.allocate(3) == [0, 1, 2, 3, 4]


@given(st.integers(0, 12), st.integers(-5, 15 * PAGE))
def test_dropping_keeps_every_page_that_reaches_the_position(count, position):
    table = PageTable(0, list(range(count)))
    dropped = table.drop_before(position)
    assert dropped + table.pages == list(range(count))
    assert all((page + 1) * PAGE <= position for page in dropped)
    assert not table.pages or (table.first + 1) * PAGE > position


def test_window_bounds_the_pages_of_a_sequence():
    assert pages_for(1000, None, 64) == 1000 // PAGE
    assert pages_for(100_000, 512, 64) <= 12
    assert pages_for(30, 512, 64) == 0
