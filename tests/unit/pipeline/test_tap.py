from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator

import pytest

from penstock.pipeline.core import Pipeline, source_of
from penstock.pipeline.tap import Tap


async def fail_at_two(source: AsyncIterator[int]) -> AsyncGenerator[int, None]:
    async for number in source:
        if number == 2:
            raise ValueError(number)
        yield number


async def test_tap_keeps_frames_and_the_error_that_ended_them() -> None:
    before, after = Tap(), Tap()
    pipeline: Pipeline[int, int] = Pipeline.start("before", before).then("fail", fail_at_two).then("after", after)
    async with pipeline.open(source_of([0, 1, 2, 3])) as numbers:
        with pytest.raises(ValueError, match="2"):
            [number async for number in numbers]
    assert (before.frames, after.frames) == ([0, 1, 2], [0, 1])
    assert before.raised is None
    assert isinstance(after.raised, ValueError)
