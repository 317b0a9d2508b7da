from __future__ import annotations

import asyncio
import time

import pytest

from penstock.api.start.share import FrontendState, SharedSlots
from penstock.extensions.batches.places import BUSY_SECONDS, LinePlaces, Rule, Turn
from penstock.services.slots import LINES, Slots


def line_places(slots: Slots, rule: Rule, paused: list[Turn]) -> LinePlaces:
    def pause(_: LinePlaces, turn: Turn) -> None:
        paused.append(turn)

    return LinePlaces(slots, rule=rule, others=lambda: slots.load.others, pause=pause, is_stopping=lambda: False)


async def test_line_that_is_cancelled_when_its_turn_comes_gives_its_place_back() -> None:
    places = line_places(Slots(1), Rule(), [])
    first = Turn("a")
    await places.enter(first)
    second = asyncio.create_task(places.enter(Turn("b")))
    await asyncio.sleep(0)
    places.leave(first)
    places.settle()
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert (places.slots.in_use, places.running, list(places.waiting)) == (0, {}, [])


async def test_lines_take_a_sixteenth_of_an_engine_that_others_have_used_lately(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slots, now = Slots(32), 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    places = line_places(slots, Rule(), [])
    found = [places.most]
    async with slots.slot("key"):
        found.append(places.most)
    now += BUSY_SECONDS / 2
    found.append(places.most)
    now += BUSY_SECONDS / 2
    found.append(places.most)
    assert found == [28, 1, 2, 28]


async def test_lines_that_cannot_pause_are_passed_over() -> None:
    slots, paused = Slots(4), list[Turn]()
    places = line_places(slots, Rule(reserve=0), paused)
    turns = [Turn("a", can_pause=True), Turn("b", can_pause=True), Turn("c"), Turn("d", can_pause=True)]
    for turn in turns:
        await places.enter(turn)
    waiting = [asyncio.create_task(slots.acquire("")) for _ in range(2)]
    await asyncio.sleep(0)
    places.settle()
    assert paused == [turns[3], turns[1]]
    for turn in paused:
        places.leave(turn)
    await asyncio.gather(*waiting)


async def test_frontends_share_the_places_of_lines() -> None:
    states = [FrontendState() for _ in range(2)]
    one, other = (SharedSlots(8, states, index, lambda _: 1.0) for index in range(2))
    paused = list[Turn](), list[Turn]()
    here, there = (line_places(slots, Rule(reserve=1), each) for slots, each in zip((one, other), paused, strict=True))
    for number in range(5):
        await here.enter(Turn(str(number), can_pause=True))
    assert (here.most, there.most) == (7, 2)
    for number in range(2):
        await there.enter(Turn(str(number), can_pause=True))
    assert (here.room, there.room) == (6, 3)
    waiting = [asyncio.create_task(one.acquire("")) for _ in range(3)]
    await asyncio.sleep(0)
    for places in (here, there):
        places.settle()
    assert len(paused[0]) == 3  # each keeps its part of the four that are left
    assert not paused[1]
    assert (one.load.lines_elsewhere, other.load.others) == (2, 3)
    for each in (here, there):
        for turn in [*each.running]:
            each.leave(turn)
    await asyncio.gather(*waiting)
    assert one.held[LINES] == other.held[LINES] == 0
    assert states[0].slots_of_lines == states[1].slots_of_lines == 0
