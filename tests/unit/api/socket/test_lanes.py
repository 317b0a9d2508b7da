from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from penstock.api.socket.lanes import MOST_NAMED, MOST_RUNNING, InvalidStreamId, Lanes, TooManyStreamIds

NAMES = (None, *(f"lane{number}" for number in range(MOST_RUNNING + 4)))
CREATE = st.tuples(st.just("add"), st.sampled_from(NAMES))
END = st.tuples(st.just("end"), st.integers(0, MOST_RUNNING - 1))
CROWD = [("add", name) for name in NAMES]


@given(st.lists(CREATE | END, max_size=120), st.booleans())
def test_jobs_start_in_the_order_of_their_lanes(steps: list[tuple[str, Any]], is_crowded: bool) -> None:
    """No job waits without a reason, and none starts twice."""
    lanes, running, waiting = Lanes[int](), dict[str | None, int](), list[tuple[str | None, int]]()
    taken: list[tuple[str, Any]] = [*(CROWD if is_crowded else ()), *steps]
    for job, (kind, value) in enumerate(taken):
        if kind == "add":
            waiting.append((value, job))
            started = lanes.add(value, job)
        elif running:
            ended = [*running][value % len(running)]
            del running[ended]
            started = lanes.end(ended)
        else:
            continue
        for name, begun in started:
            assert name not in running
            assert (name, begun) == next(each for each in waiting if each[0] not in running)
            waiting.remove((name, begun))
            running[name] = begun
        assert len(running) <= MOST_RUNNING
        assert len(running) == MOST_RUNNING or all(name in running for name, _ in waiting)
        assert (lanes.waiting, lanes.is_idle) == (len(waiting), not (running or waiting))
    assert lanes.clear() == [job for _, job in waiting]
    assert lanes.waiting == 0


@pytest.mark.parametrize("name", ["a", "A.b_c-9", ".", "x" * 256])
def test_name_of_a_lane_is_its_stream_id(name: str) -> None:
    assert Lanes[int]().enter(name) == name


@pytest.mark.parametrize("name", ["", "x" * 257, "a b", "a\n", "ä", "٣", "a/b", None, 0, [], {}, True])
def test_other_stream_ids_are_refused(name: object) -> None:
    with pytest.raises(InvalidStreamId) as refused:
        Lanes[int]().enter(name)
    assert (refused.value.code, refused.value.param) == ("invalid_stream_id", "stream_id")


def test_names_count_for_the_life_of_the_connection() -> None:
    lanes = Lanes[int]()
    names = [f"lane{number}" for number in range(MOST_NAMED)]
    for name in [*names, *names]:
        assert [lanes.enter(name), *lanes.end(name)] == [name]
    with pytest.raises(TooManyStreamIds) as refused:
        lanes.enter("one-more")
    assert (refused.value.code, refused.value.param) == ("websocket_stream_limit_reached", "stream_id")
    assert lanes.enter(UNSET) is None
