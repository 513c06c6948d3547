"""Matches of a prompt's prefix, and the reported reason for an incomplete match."""

import pytest

from mlxinfer.cache.pages import PAGE
from mlxinfer.cache.pool import PageDemand, PagePool

LONG, SEVENS = list(range(1000)), [7, 7]


def pool(*windows: int | None, exact: bool = False, reuse: int = 1024, capacity: int = 2048) -> PagePool:
    return PagePool(
        windows or (None,), kv_cache_tokens=capacity, chunk=1024, prefix_cache_tokens=reuse, snapshot_bytes=1 << 20, exact=exact
    )


def leave(pool: PagePool, tokens: list[int], *kept: int) -> None:
    match = pool.find(tokens)
    slot, past = pool.open(match), match.reused
    for stop in sorted({*kept, len(tokens)}):
        pool.seal(slot, past, stop - past, tokens)
        pool.leave_behind(slot, stop)
        pool.keep(slot, tokens[:stop], lambda count: (None, count))
        past = stop
    pool.release(slot)


def found(pool: PagePool, tokens: list[int]) -> tuple[int, str]:
    match = pool.find(tokens)
    return match.reused, match.note


def test_notes_say_why_there_is_not_more():
    full = pool()
    assert found(full, LONG) == (0, "nothing cached begins like this")
    leave(full, LONG[:200])
    assert found(full, LONG[:200]) == (199, "")
    assert found(full, LONG[:150]) == (128, "")
    assert found(full, LONG) == (200, "nothing cached beyond token 200")
    assert found(full, LONG[:195] + [7] * 50) == (195, "diverged at token 195")
    assert found(full, LONG[:100] + [7] * 50) == (64, "diverged at token 100")
    assert found(full, [7, *LONG]) == (0, "nothing cached begins like this")
    assert found(pool(reuse=0), LONG)[0] == 0


def test_states_count_at_their_own_position_only():
    states = pool(None, exact=True)
    leave(states, LONG[:200], 64)
    assert found(states, LONG) == (200, "nothing cached beyond token 200")
    assert found(states, LONG[:190] + SEVENS) == (64, "diverged at token 190, the last state kept is that at token 64")
    assert found(states, LONG[:60] + SEVENS) == (0, "diverged at token 60, no state of it is kept")


@pytest.mark.parametrize("exact", [False, True])
def test_a_prefix_never_ends_inside_a_span(exact):
    cached = pool(None, exact=exact)
    leave(cached, LONG[:300], 40, 70, 130, 190)

    def reused(length: int, *spans: tuple[int, int]) -> int:
        return cached.find([*LONG[:length], *SEVENS], spans=spans).reused

    ends = [reused(length, (60, 150), (160, 230)) for length in (50, 59, 60, 100, 149, 150, 155, 160, 229, 230, 299, 300)]
    assert ends == ([40] * 11 + [300] if exact else [40, 40, 40, 40, 40, 150, 155, 160, 160, 160, 299, 300])
    assert [reused(length) for length in (70, 130, 250)] == ([70, 130, 190] if exact else [70, 130, 192])


def test_keys_of_image_rows_are_no_ids():
    """Two images whose keys agree in the lowest 32 bits share nothing."""
    cached = pool()
    one, two = [[5, 6, *((1 << 62) + (top << 32) + row for row in range(100)), 7, 8] for top in (1, 2)]
    leave(cached, one)
    assert cached.find(one).reused == len(one) - 1
    assert cached.find(two).reused == 0


def test_a_window_needs_its_own_pages_only():
    window = pool(100, reuse=128)
    leave(window, LONG[:640], 320)
    assert found(window, LONG) == (640, "nothing cached beyond token 640")
    assert found(window, LONG[:330] + SEVENS) == (0, "diverged at token 330, pages of the window before token 320 are gone")


def test_the_end_goes_before_the_beginning():
    small = pool(reuse=256)
    leave(small, LONG[:640])
    assert small.find(LONG).reused == 256
    leave(small, [7, *LONG[:127]])
    assert small.find(LONG).reused == 128


def test_what_a_new_sequence_takes_over_is_no_room_for_others():
    small = pool(capacity=640, reuse=640)
    leave(small, LONG[:320])
    match = small.find(LONG)
    assert small.room([PageDemand(None, 320, 320, match)])
    assert not small.room([PageDemand(None, 320, 384, match)])
    assert not small.room([PageDemand(None, 320, 320, match), PageDemand(None, 0, PAGE)])
    assert not small.room([PageDemand(None, 320, 384)])


def test_what_sequences_share_is_counted_once():
    small = pool(capacity=640, reuse=640)
    leave(small, LONG[:512])
    slots = [small.open(small.find(LONG)) for _ in range(4)]
    assert small.usage().used == 8
    assert small.room([PageDemand(slot, 512, 1) for slot in slots])
    assert small.room([PageDemand(slot, 512, PAGE) for slot in slots[:2]])
    assert not small.room([PageDemand(slot, 512, PAGE) for slot in slots[:3]])
    assert small.fits(640)
    assert not small.fits(704)
