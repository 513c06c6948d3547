"""Executes rank 0's steps on the blocks and pages of another rank. All decisions are rank 0's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import mlx.core as mx

from ..adapters.adapted_model import AdaptedModel
from ..cache.base import AttentionSpec, Elsewhere, LayerSpec
from ..cache.kv_format import KVFormat
from ..cache.paged import PagedCache
from ..cache.pages import PageTable
from ..cache.pool import Places
from ..cache.state import Rows
from ..cache.step import CacheStep
from ..loading.repack_cache.pooled_experts import PooledExperts
from ..models.decoder import BlockStack
from ..models.pipeline_stage import side_by_side
from ..util.dataclass import dataclass
from .leader import read_rows
from .messages import Op, StepMessage, parse_messages, unpack_pages
from .ring import Ring

_IN_FLIGHT = 2
"""Steps submitted and not yet finished: rank 0 may be far ahead while it reads a prompt."""


class FollowingCache(PagedCache):
    """Cache that repeats the operations of rank 0's cache, for this rank's layers, without a prefix index."""

    def __init__(self, layers: Sequence[LayerSpec], dtype: mx.Dtype, kv: KVFormat, kv_cache_tokens: int, chunk: int) -> None:
        self._slots = 0
        self._snapshots: dict[int, Rows] = {}
        super().__init__(layers, dtype=dtype, kv_cache_tokens=kv_cache_tokens, chunk=chunk, kv=kv)

    def follow_open(self, numbers: Sequence[int]) -> None:
        slot, snapshot, count, states = numbers[:4]
        for group, pages in zip(self.pool.groups, unpack_pages(numbers[4:]), strict=True):
            first, *ids = [page for page in pages if page is not None]
            group.tables[slot] = PageTable(first, ids)
        self._slots = max(self._slots, slot + 1)
        self._begin_slot(slot, self._snapshots[snapshot] if snapshot >= 0 else None, count, states=bool(states))

    def follow_fork(self, slot: int, new: int) -> None:
        for group in self.pool.groups:
            table = group.tables[slot]
            group.tables[new] = PageTable(table.first, list(table.pages))
        self._slots = max(self._slots, new + 1)
        self._copy_slot(slot, new)

    def follow_release(self, slot: int) -> None:
        for group in self.pool.groups:
            del group.tables[slot]
        for recurrent in self.recurrent:
            recurrent.release(slot)

    def follow_take(self, number: int, slot: int, count: int) -> None:
        self._snapshots[number] = self._rows(slot, count)[0]

    def follow_drop(self, number: int) -> None:
        self._snapshots.pop(number, None)  # missing if an earlier cache had it

    def follow_store(self, step: CacheStep, slot: int, pages: list[list[int | None]]) -> None:
        """Store the pages that a finished step filled. `pages` has, for each group, the places and the slot's newest pages."""
        segment = next(s for s in step.segments if s.slot == slot)
        places: list[Places] = []
        for group, own, new in zip(self.pool.groups, pages[::2], pages[1::2], strict=True):
            group.tables[slot].pages += [page for page in new if page is not None]
            places.append(own)
            for allocator, ids in group.owners([page for page in own if page is not None]):
                allocator.reach(ids)
        self._store(segment, step, places)
        for group in self.pool.groups:
            if group.window is not None:
                group.tables[slot].drop_before(segment.past + segment.count - group.window + 1)
        self._unsubmitted = True

    def _grow_slots(self) -> None:
        for store, _ in self.attention:
            store.grow(slots=self._slots)


@dataclass(slots=True)
class _Running:
    number: int
    """Rank 0's number of the step."""
    step: CacheStep
    awaited: list[mx.array]
    """Arrays that are evaluated once the step has finished."""


class Follower:
    """Runs the blocks of one rank."""

    def __init__(
        self,
        stack: BlockStack,
        ring: Ring,
        dtype: mx.Dtype,
        kv: KVFormat,
        *,
        before: int = 0,
        after: int = 0,
        tapped: int = 0,
        adapted: AdaptedModel | None = None,
        windows: Sequence[int | None] = (),
        experts: PooledExperts | None = None,
    ) -> None:
        """`before` and `after` count the columns that rows have after the hidden ones when they arrive and leave.

        These columns are inputs of this rank's and later ranks' blocks; most families have none. `tapped` counts the copies of rows that
        earlier ranks added for a draft head. `adapted` has the blocks with adapters, `windows` is that of `Orders`. `experts` are the pools
        of routed experts.
        """
        self._experts = experts
        self._adapted = adapted
        self.stack = stack
        self.steps = 0
        """Submitted steps."""
        self._ring = ring
        self.cache: FollowingCache
        layers = (*stack.layers, *(Elsewhere(AttentionSpec(1, 1, 1, window)) for window in windows))
        self._new_cache = partial(FollowingCache, layers, dtype, kv)
        self._columns, self._tapped = (stack.hidden_size, before, after), tapped
        self._running: list[_Running] = []
        self._filled: dict[int, CacheStep] = {}
        """Steps whose pages are still to be stored, by number."""

    def take(self, data: bytes) -> None:
        """Execute packed messages."""
        for op, numbers in parse_messages(data):
            self._take(op, numbers)

    def _take(self, op: Op, numbers: list[int]) -> None:
        if op is Op.STEP:
            self._step(StepMessage.unpack(numbers))
        elif op is Op.STORE:
            self._wait(0)
            self._filled = {n: step for n, step in self._filled.items() if n >= numbers[0]}
            self.cache.follow_store(self._filled[numbers[0]], numbers[1], unpack_pages(numbers[2:]))
        elif op is Op.OPEN:
            self.cache.follow_open(numbers)
        elif op is Op.FORK:
            self.cache.follow_fork(*numbers)
        elif op is Op.RELEASE:
            self.cache.follow_release(*numbers)
        elif op is Op.TAKE:
            self.cache.follow_take(*numbers)
        elif op is Op.DROP:
            self.cache.follow_drop(*numbers)
        elif op is Op.VERIFIED:
            self.cache.verified(*numbers)
        else:
            self._wait(0)
            self._filled.clear()
            self.cache = self._new_cache(*numbers)

    def _step(self, message: StepMessage) -> None:
        """Receive rows, run the blocks, and send the result on. The last rank sends rank 0 only the rows that it reads.

        Raises `ExpertReadError`.
        """
        self.cache.submit()
        self._wait(_IN_FLIGHT - 1)
        step = self.cache.begin(message.segments)
        sent = self._compute(message, step)
        arrays = [*step.state, sent]
        mx.async_eval(arrays)  # type: ignore[no-untyped-call]
        if step.needs_commit:
            self._filled[message.number] = step
        # Keep as few references as possible: MLX writes in place only into arrays with a single one.
        last = arrays if step.needs_commit else [sent]
        self._running.append(_Running(message.number, step, last))
        self.steps += 1

    def _compute(self, message: StepMessage, step: CacheStep) -> mx.array:
        hidden, before, after = self._columns
        rows = message.segments[-1].start + message.segments[-1].count
        stack = self.stack if self._adapted is None or not message.adapters else self._adapted.for_slots(message.adapters)
        if stack.part.shares > 1:
            x = self._ring.sum(mx.zeros((rows, hidden), message.dtype))
            y = stack.advance(x, step, stack.rotations(step))
            # All ranks must take part in the same sums, and rank 0 computes the last ones only if it reads rows.
            return y if any(s.read for s in message.segments) else x
        wide = hidden * (1 + self._tapped)
        whole = self._ring.receive((rows, wide + before), message.dtype)
        x, *tapped = side_by_side(whole[:, :wide] if before else whole, hidden)
        inputs = None
        if before:
            own = whole[:, wide : wide + before - after]
            inputs = mx.swapaxes(own.reshape(rows, len(self.stack.blocks), -1), 0, 1)
        y = stack.advance(x, step, stack.rotations(step), None, inputs, tapped)
        if self._experts is not None:
            mx.eval(y)  # rows of experts that could not be read must not be sent
            self._experts.check(waits=False)
        assert y.dtype == message.dtype, f"rows are {message.dtype}, and {y.dtype} after the blocks of this rank"
        later = [whole[:, wide + before - after :]] if after else []
        y = mx.concatenate([y, *tapped, *later], axis=1) if tapped or later else y
        if self._ring.next:
            return self._ring.send(y)
        read = read_rows(message.segments)
        if not read:
            return y
        return self._ring.send(y if len(read) == rows else y[mx.array(read)])

    def _wait(self, most: int) -> None:
        """Wait until at most `most` steps are in flight."""
        while len(self._running) > most:
            ended = self._running.pop(0)
            mx.eval(ended.awaited)
            ended.step.close()
