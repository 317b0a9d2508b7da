from __future__ import annotations

from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.http import held_bytes
from penstock.api.http.held_bytes import (
    LARGE_SECONDS,
    MOST_AT_ONCE,
    SMALL_SECONDS,
    HeldBody,
    HeldBytes,
)
from penstock.pipeline.errors import ServerBusy

SMALL, MOST_SMALL, LIMIT = 10, 30, 40

steps = st.tuples(
    st.sampled_from(["begin", "take", "take", "take", "wait", "finish", "release"]),
    st.integers(1, 15),
    st.integers(0, 9),
)


class Bodies:
    """Bodies that arrive at a server, and a clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.held = HeldBytes(clock=lambda: self.now)
        self.all = list[HeldBody]()
        self.dropped = set[int]()

    def begin(self, *, message: bool = False) -> HeldBody:
        number = len(self.all)
        begin = self.held.message if message else self.held.body
        self.all.append(begin(LIMIT, lambda: self.dropped.add(number)))
        return self.all[-1]

    def take(self, body: HeldBody, count: int) -> None:
        """Take bytes; a refusal changes nothing, and no slow body could have been dropped instead."""
        before = body.size
        try:
            body.take(count)
        except ServerBusy:
            assert body.size == before
            pool = body.large if before + count > SMALL else body.small
            since = [at for other, at in pool.arriving.items() if other is not body]
            assert next(iter(pool.arriving), None) is body or all(self.now - at < pool.seconds for at in since)

    def check(self) -> None:
        """Check what the pools count, and their bounds."""
        for pool in (self.held.bodies, self.held.messages, self.held.large):
            here = [body for body in self.all if body.size and body._pool is pool]
            assert pool.count == sum(body.size for body in here)
            assert pool.count <= (MOST_AT_ONCE * LIMIT if pool is self.held.large else MOST_SMALL)
            assert set(pool.arriving) == {body for body in here if not body.has_ended}
        assert not any(self.all[number].size for number in self.dropped)


@given(st.lists(steps, max_size=60))
def test_bounds_hold_and_no_body_is_refused_while_a_slow_one_could_be_dropped(
    taken: list[tuple[str, int, int]],
) -> None:
    bodies = Bodies()
    with patch.multiple(held_bytes, SMALL=SMALL, MOST_SMALL_BYTES=MOST_SMALL):
        for step, amount, number in taken:
            alive = [
                body for other, body in enumerate(bodies.all) if other not in bodies.dropped and not body.has_ended
            ]
            body = alive[number % len(alive)] if alive else bodies.begin(message=bool(number % 2))
            if step == "begin":
                bodies.begin(message=bool(number % 2))
            elif step == "wait":
                bodies.now += amount
            elif step == "take" and body.size + amount <= LIMIT:
                bodies.take(body, amount)
            elif step == "finish":
                body.finish()
            elif step == "release":
                body.finish()
                body.release()
            bodies.check()


@pytest.mark.parametrize(("size", "seconds"), [(SMALL, SMALL_SECONDS), (LIMIT, LARGE_SECONDS)])
def test_slow_body_makes_room_for_an_honest_one_and_whole_ones_stay(size: int, seconds: float) -> None:
    bodies = Bodies()
    with patch.multiple(held_bytes, SMALL=SMALL, MOST_SMALL_BYTES=MOST_AT_ONCE * SMALL):
        for _ in range(MOST_AT_ONCE):
            bodies.begin().take(size)
        bodies.all[0].finish()
        honest = bodies.begin()
        with pytest.raises(ServerBusy):
            honest.take(size)
        bodies.now = seconds
        honest.take(size)
    assert bodies.dropped == {1}


def test_large_bodies_take_no_room_from_small_ones() -> None:
    bodies = Bodies()
    with patch.multiple(held_bytes, SMALL=SMALL, MOST_SMALL_BYTES=MOST_SMALL):
        for _ in range(MOST_AT_ONCE):
            bodies.begin().take(LIMIT)
        bodies.begin().take(SMALL)
    assert (bodies.held.bodies.count, bodies.held.large.count) == (SMALL, MOST_AT_ONCE * LIMIT)
