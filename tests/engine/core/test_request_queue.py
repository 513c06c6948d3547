"""The order of the waiting list compared to a plain search, and its bounds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines.counting_engine import sequence

from mlxinfer.engine.core.request_queue import RequestQueue, VirtualTokenCounter
from mlxinfer.engine.core.sequence import Sequence
from mlxinfer.errors import QueueFullError

CLIENTS = "abcd"
ACTION = st.one_of(
    st.tuples(st.just("push"), st.sampled_from(CLIENTS), st.integers(0, 2)),
    st.tuples(st.just("pop"), st.just(""), st.just(0)),
    st.tuples(st.just("back"), st.just(""), st.integers(0, 100)),
    st.tuples(st.just("remove"), st.just(""), st.integers(0, 100)),
    st.tuples(st.just("serve"), st.sampled_from(CLIENTS), st.integers(1, 50)),
)


@settings(deadline=None)
@given(st.lists(ACTION, max_size=60))
def test_the_first_in_line_is_the_first_of_a_plain_search(actions: list[tuple[str, str, int]]) -> None:
    waiting, inside, back, ran, arrival = RequestQueue(1000), [], set(), [], 0
    for client in CLIENTS:
        waiting.service.join(client)

    def key(s: Sequence) -> tuple[object, ...]:
        return (s.priority, 0, 0, s.arrival) if s in back else (s.priority, 1, waiting.service.of(s.client_id), s.arrival)

    for action, client, number in actions:
        if action == "push":
            arrival += 1
            s = sequence(1, 1, client_id=client, priority=number, arrival=arrival)
            inside.append(s)
            waiting.push(s)
        elif action == "serve":
            waiting.service.served[client] += number
        elif action == "back" and ran:
            s = ran.pop(number % len(ran))
            back.add(s)
            inside.append(s)
            waiting.push_back(s)
        elif action == "remove" and inside:
            s = inside.pop(number % len(inside))
            assert waiting.remove(s)
            assert not waiting.remove(s)
        elif action == "pop":
            s = waiting.peek()
            assert s is min(inside, key=key, default=None)
            if s:
                waiting.remove(s)
                inside.remove(s)
                ran.append(s)
        assert waiting.peek() is min(inside, key=key, default=None)
        assert len(waiting) == len(inside)
        assert set(waiting) == set(inside)


def test_those_set_aside_have_their_places_again() -> None:
    waiting = RequestQueue(10)
    ours = [sequence(1, 1, client_id=client, arrival=i, deadline=9.0 - i) for i, client in enumerate("aabb")]
    back = sequence(1, 1, client_id="c", arrival=7)
    for s in ours:
        waiting.push(s)
    waiting.push_back(back)
    with waiting.aside() as set_aside:
        for count, s in enumerate([back, ours[0], ours[1]], 1):
            assert waiting.peek() is s
            assert set_aside(s) == count
        assert waiting.peek() is ours[2]
        waiting.remove(ours[2])
    assert len(waiting) == 4
    assert waiting.expired(8.0) == [ours[3], ours[1]]
    for s in (back, ours[0], ours[1], ours[3]):
        assert waiting.peek() is s
        waiting.remove(s)


def test_a_full_list_refuses_with_its_numbers_but_takes_back() -> None:
    waiting = RequestQueue(2)
    for i in range(2):
        waiting.push(sequence(1, 1, arrival=i))
    with pytest.raises(QueueFullError, match="2 requests are waiting already, of 2"):
        waiting.push(sequence(1, 1, arrival=3))
    returned = sequence(1, 1, arrival=0)
    waiting.push_back(returned)
    assert waiting.peek() is returned


def test_deadlines() -> None:
    waiting = RequestQueue(10)
    late, early, never = sequence(1, 1, deadline=2.0), sequence(1, 1, deadline=1.0), sequence(1, 1)
    for s in (late, early, never):
        waiting.push(s)
    assert waiting.expired(0.5) == []
    assert waiting.expired(1.5) == waiting.expired(1.5) == [early]
    waiting.remove(early)
    assert waiting.expired(5.0) == [late]


def test_a_client_that_was_away_has_no_credit_and_keeps_its_debt() -> None:
    service = VirtualTokenCounter()
    service.join("busy")
    service.join("away")
    service.leave("away")
    service.served["busy"] += 1000
    service.join("away")
    service.join("new")
    assert service.of("away") == service.of("new") == 1000
    service.served["new"] += 500
    service.leave("new")
    service.join("new")
    assert service.of("new") == 1500


def test_names_of_clients_do_not_pile_up() -> None:
    service = VirtualTokenCounter()
    service.join("stays")
    for i in range(5000):
        service.join(str(i))
        service.served[str(i)] += i
        service.leave(str(i))
    assert len(service.served) + len(service._least) < 500


def test_removed_entries_do_not_pile_up() -> None:
    waiting = RequestQueue(10)
    waiting.push(sequence(1, 1, deadline=0.0))
    for i in range(2000):
        s = sequence(1, 1, client_id=str(i), arrival=i, deadline=9.0)
        waiting.push(s)
        waiting.remove(s)
    assert len(waiting._heap) + len(waiting._deadlines) + len(waiting._lines) < 300
