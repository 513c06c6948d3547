"""The pool under random use, against a model of what is in each page: the tokens that it was filled with and all those before them."""

import subprocess
import sys

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.processes.examples import examples

from mlxinfer.cache.pages import PAGE
from mlxinfer.cache.pool import PageDemand, PagePool
from mlxinfer.cache.prefix_tree import ITEM, token_bytes

CAPACITY, REUSE, SNAPSHOTS, CHUNK = 14, 9, 300, 200
COUNTS = st.one_of(st.integers(1, CHUNK), st.sampled_from([1, 20, PAGE, 2 * PAGE, 3 * PAGE]))


class Use(RuleBasedStateMachine):
    """Sequences are runs of 0 and of 1, so that many begin alike."""

    windows: tuple[int | None, ...] = (None, 100, 20)
    first = True
    exact = False

    @initialize()
    def start(self) -> None:
        self.pool = PagePool(
            self.windows,
            kv_cache_tokens=CAPACITY * PAGE,
            chunk=CHUNK,
            first=self.first,
            prefix_cache_tokens=REUSE * PAGE,
            snapshot_bytes=SNAPSHOTS,
            exact=self.exact,
        )
        self.index = self.pool.index
        assert self.index
        self.running: dict[int, list[int]] = {}
        self.known: list[list[int]] = [[]]
        self.content: list[dict[int, list[int]]] = [{} for _ in self.pool.groups]

    # --- what happens

    @precondition(lambda self: len(self.running) < 5)
    @rule(data=st.data(), value=st.integers(0, 1), more=st.integers(1, 100))
    def open(self, data, value, more):
        old = data.draw(st.sampled_from(self.known[-12:]))
        cut = data.draw(st.one_of(st.just(len(old)), st.integers(0, len(old))))
        tokens = old[:cut] + [value] * more
        match = self.pool.find(tokens)
        assert 0 <= match.reused < len(tokens)
        assert match == self.pool.find(tokens)
        depth = match.reused // PAGE
        for group, content, (first, pages) in zip(self.pool.groups, self.content, match.tables, strict=match.reused > 0):
            assert first <= group.oldest(match.reused)
            assert first + len(pages) == depth or not match.reused
            for number, page in enumerate(pages, first):
                assert content[page] == tokens[: (number + 1) * PAGE]
        if match.snapshot:
            held = match.snapshot.content
            assert held == tokens[: match.reused] if self.exact else held[: match.reused] == tokens[: match.reused]
        else:
            assert match.reused % PAGE == 0
            assert not (self.exact and match.reused)
        assert self.pool.room([PageDemand(None, match.reused, 0, match)])
        self.running[self.pool.open(match)] = tokens[: match.reused]

    @precondition(lambda self: self.running)
    @rule(data=st.data(), known=st.booleans())
    def step(self, data, known):
        slots = data.draw(st.lists(st.sampled_from(sorted(self.running)), min_size=1, max_size=3, unique=True))
        parts = [(slot, [data.draw(st.integers(0, 1))] * data.draw(COUNTS)) for slot in slots]
        if not self.pool.room([PageDemand(slot, len(self.running[slot]), len(new)) for slot, new in parts]):
            self.release(data)
            return
        for slot, new in parts:
            past = len(self.running[slot])
            self.running[slot] = tokens = self.running[slot] + new
            self.seal(slot, past, tokens, known or len(tokens) % 7 > 0)
            self.pool.leave_behind(slot, len(tokens))

    def seal(self, slot: int, past: int, tokens: list[int], known: bool) -> None:
        if past // PAGE == len(tokens) // PAGE:
            return
        places = self.pool.seal(slot, past, len(tokens) - past, tokens if known else None)
        for number, (group, pages) in enumerate(zip(self.pool.groups, places, strict=True)):
            own = group.tables[slot].pages[-len(pages) :]
            others = {page for other, table in group.tables.items() if other != slot for page in table.pages}
            for i, place in enumerate(pages):
                if place is not None:
                    # It is written now, so nobody else may have it.
                    assert own[i] == place
                    assert place not in others
                    self.content[number][place] = tokens[: (past // PAGE + i + 1) * PAGE]

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def keep(self, data):
        slot = data.draw(st.sampled_from(sorted(self.running)))
        tokens = self.running[slot]
        self.pool.keep(slot, tokens, lambda count: (list(tokens), 40 + count))
        self.known.append(tokens)

    @precondition(lambda self: self.running and len(self.running) < 5)
    @rule(data=st.data())
    def fork(self, data):
        slot = data.draw(st.sampled_from(sorted(self.running)))
        self.running[self.pool.fork(slot)] = self.running[slot]

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def release(self, data):
        slot = data.draw(st.sampled_from(sorted(self.running)))
        self.known.append(self.running.pop(slot))
        self.pool.release(slot)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data):
        self.keep(data)
        self.release(data)

    @rule()
    def clear(self):
        self.index.clear()
        assert not self.index.snapshots
        assert not any(a.idle for g in self.pool.groups for a in g.allocators)

    # --- what holds

    @invariant()
    def pages_are_counted(self):
        for number, group in enumerate(self.pool.groups):
            used = [group.owner(page) for table in group.tables.values() for page in table.pages]
            kept = [group.owner(n.pages[number]) for n in self.index.nodes() if n.pages[number] is not None]
            assert len(kept) == len(set(kept))
            for allocator in group.allocators:
                here = {page for owner, page in used if owner is allocator}
                idle = {page for owner, page in kept if owner is allocator} - here
                assert set(allocator.idle) == idle
                assert allocator.used == len(here)
                assert allocator.free == CAPACITY - len(here | idle) >= 0
                assert len(idle) <= REUSE
                assert all(allocator.in_use(page) for page in here)

    @invariant()
    def pages_hold_what_they_are_for(self):
        for number, group in enumerate(self.pool.groups):
            content = self.content[number]
            for slot, table in group.tables.items():
                tokens = self.running[slot]
                assert table.end == len(tokens) // PAGE * PAGE
                assert table.first <= group.oldest(len(tokens))
                for i, page in enumerate(table.pages, table.first):
                    assert content[page] == tokens[: (i + 1) * PAGE]
            for node in self.index.nodes():
                if node.pages[number] is not None:
                    assert token_bytes(content[node.pages[number]]) == b"".join(n.block for n in node.chain())

    @invariant()
    def the_index_is_whole(self):
        nodes = list(self.index.nodes())
        assert {id(n) for n in nodes} == {id(n) for n in self.index._nodes.values()}
        assert not any(n.bare for n in nodes)
        assert all(self.index.node(n.digest) is n for n in nodes)
        heads = [slot.head for slot in self.pool.slots.values() if slot.head]
        assert {id(h) for h in heads} <= {id(n) for n in nodes}
        assert all(n.pins == sum(h is n for h in heads) for n in nodes)
        if None in self.windows:
            number = self.windows.index(None)
            assert all(n.parent is None or n.pages[number] is not None for n in nodes)

    @invariant()
    def snapshots_are_bounded(self):
        kept = [s for n in self.index.nodes() for s in n.snapshots]
        assert set(kept) == set(self.index.snapshots)
        assert sum(s.nbytes for s in kept) == self.index.nbytes <= SNAPSHOTS
        for s in kept:
            assert token_bytes(s.content) == b"".join(n.block for n in s.node.chain()) + s.tail
            assert len(s.tail) < PAGE * ITEM

    def teardown(self):
        if hasattr(self, "pool"):
            for slot in self.running:
                self.pool.release(slot)
            self.index.clear()
            assert all(a.free == CAPACITY for g in self.pool.groups for a in g.allocators)
            assert list(self.index.nodes()) == []


class UseOfStates(Use):
    first = False
    exact = True


class UseOfWindowsOnly(Use):
    windows = (100,)


class UseOfStatesOnly(Use):
    windows = ()
    exact = True


TestUse = Use.TestCase
TestUseOfStates = UseOfStates.TestCase
TestUseOfWindowsOnly = UseOfWindowsOnly.TestCase
TestUseOfStatesOnly = UseOfStatesOnly.TestCase
for _case in (TestUse, TestUseOfStates, TestUseOfWindowsOnly, TestUseOfStatesOnly):
    _case.settings = settings(max_examples=examples(60), stateful_step_count=50, deadline=None)


def test_without_mlx():
    script = "import sys, mlxinfer.cache.pool; sys.exit(any(m.split('.')[0] == 'mlx' for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
