"""The pauses between starts of a model that fail."""

from __future__ import annotations

from penstock.extensions.models.life import LONGEST_PAUSE, Pause


async def test_a_pause_doubles_up_to_the_longest_however_many_starts_fail() -> None:
    pause = Pause()
    assert pause.left <= 0
    assert [pause.begin() for _ in range(8)] == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert {pause.begin() for _ in range(2_000)} == {LONGEST_PAUSE}
    assert 0 < pause.left <= LONGEST_PAUSE
    pause.reset()
    assert pause.begin() == 1.0
