"""The number of tokens per chunk: it follows the load of the loop, and no token is lost."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.stages.models.vllm_private import set_stream_interval
from penstock.stages.services.engines import stream_interval
from tests.support.clock import Clock

LOOKS = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 0.1)), max_size=50)


@given(LOOKS)
def test_interval_changes_in_bounded_steps(looks: list[tuple[float, float]]) -> None:
    controller, was = stream_interval.StreamInterval(), 1
    for busy, late in looks:
        interval = controller.feed(busy, late)
        assert 1 <= interval <= stream_interval.MOST
        assert interval in {was // 2, was, was * 2}
        was = interval


@given(LOOKS)
def test_free_loop_gets_every_token_at_once(looks: list[tuple[float, float]]) -> None:
    controller = stream_interval.StreamInterval()
    for busy, late in looks:
        controller.feed(busy, late)
    for _ in range(stream_interval.MOST.bit_length() - 1):
        controller.feed(stream_interval.FREE / 2, stream_interval.ON_TIME / 2)
    assert controller.interval == 1


def test_busy_loop_gets_larger_chunks() -> None:
    controller = stream_interval.StreamInterval()
    assert [controller.feed(stream_interval.BUSY + 0.1, 0.0) for _ in range(5)] == [2, 4, 8, 8, 8]


def test_loop_that_is_always_late_gets_larger_chunks() -> None:
    controller = stream_interval.StreamInterval()
    intervals = [controller.feed(0.0, stream_interval.LATE * 2) for _ in range(stream_interval.LOOKS + 4)]
    assert intervals == [1] * (stream_interval.LOOKS - 1) + [2, 4, 8, 8, 8]


@given(st.lists(st.floats(0, 1), max_size=30))
def test_loop_that_is_late_now_and_then_keeps_single_tokens(delays: list[float]) -> None:
    controller = stream_interval.StreamInterval()
    on_time = [0.0] * (stream_interval.LOOKS - 1)
    for late in (late for delay in delays for late in (delay, *on_time)):
        assert controller.feed(stream_interval.BUSY, late) == 1


def test_loop_with_time_to_spare_gets_single_tokens_again_though_it_is_late_now_and_then() -> None:
    controller = stream_interval.StreamInterval()
    for _ in range(3):
        controller.feed(1.0, 0.0)
    late = stream_interval.LATE * 2
    assert [controller.feed(0.0, each) for each in (late, late, 0.0, late)] == [4, 2, 1, 1]


@pytest.mark.parametrize(
    ("busy", "late"),
    [
        (stream_interval.BUSY, 0.0),
        (stream_interval.FREE, 0.0),
        (0.0, stream_interval.LATE),
        (0.0, stream_interval.ON_TIME),
    ],
    ids=lambda value: f"{value:g}",
)
def test_loop_between_busy_and_free_keeps_its_interval(busy: float, late: float) -> None:
    controller = stream_interval.StreamInterval()
    for _ in range(stream_interval.LOOKS):
        controller.feed(1.0, late)
    assert [controller.feed(busy, late) for _ in range(5)] == [stream_interval.MOST] * 5


@given(st.floats(0, 1))
def test_steady_load_has_a_steady_interval(work: float) -> None:
    controller = stream_interval.StreamInterval()
    intervals = [controller.feed(work * (0.1 + 0.9 / controller.interval), 0.0) for _ in range(20)]
    assert len(set(intervals[4:])) == 1


class Request:
    """A model of vLLM's request state: it holds tokens back until ``stream_interval`` of them wait."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.sent: list[list[int]] = []
        self.detokenizer = SimpleNamespace(num_output_tokens=lambda: len(self.tokens))
        self.stream_interval = 1
        self.sent_tokens_offset = 0

    def generate(self, count: int, *, finished: bool = False) -> None:
        """Add tokens, and send them by the rule of vLLM's `RequestState.make_request_output`."""
        new = list(range(len(self.tokens), len(self.tokens) + count))
        self.tokens += new
        if self.stream_interval > 1:
            waiting = len(self.tokens) - self.sent_tokens_offset
            if not (finished or self.sent_tokens_offset == 0 or waiting >= self.stream_interval):
                return
            new = self.tokens[self.sent_tokens_offset :]
            self.sent_tokens_offset = len(self.tokens)
        self.sent.append(new)


@dataclass
class Load:
    """A stand-in for `time`: a clock, and the processor time that the loop has used."""

    clock: Clock
    worked: float = 0.0

    def monotonic(self) -> float:
        return self.clock.now

    def thread_time(self) -> float:
        return self.worked

    async def pass_period(self, busy: float, late: float) -> None:
        """Let one period pass: the loop works for the share ``busy``, and its timer fires ``late`` seconds late."""
        await self.clock.turn()
        self.worked += busy * (stream_interval.PERIOD + late)
        await self.clock.move(stream_interval.PERIOD + late)


@pytest.fixture
def load(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Load:
    load = Load(clock)
    monkeypatch.setattr(stream_interval, "time", load)
    return load


STEPS = st.lists(
    st.one_of(st.sampled_from([1, 2, 4, 8]).map(lambda n: ("pace", n)), st.integers(1, 3).map(lambda n: ("tokens", n)))
)


@given(STEPS)
def test_tokens_are_neither_lost_nor_repeated(steps: list[tuple[str, int]]) -> None:
    request: Any = Request()
    for kind, number in steps:
        if kind == "pace":
            set_stream_interval(request, number)
        else:
            request.generate(number)
            assert request.sent
            assert len(request.tokens) - sum(map(len, request.sent)) < max(2, request.stream_interval)
    request.generate(1, finished=True)
    assert [token for tokens in request.sent for token in tokens] == request.tokens


@pytest.mark.parametrize(("busy", "late"), [(1.0, 0.0), (0.0, 2 * stream_interval.LATE)])
async def test_interval_follows_the_loop(load: Load, busy: float, late: float) -> None:
    request: Any = Request()
    pacing = asyncio.create_task(stream_interval.adapt_stream_interval({"request": request}))
    request.generate(1)
    for _ in range(stream_interval.LOOKS - 1 if late else 0):
        await load.pass_period(0.0, late)
    for interval in (2, 4, stream_interval.MOST):
        await load.pass_period(busy, late)
        assert request.stream_interval == interval
    for interval in (4, 2, 1):
        request.generate(1)
        await load.pass_period(0.0, 0.0)
        assert request.stream_interval == interval
    pacing.cancel()
    request.generate(1, finished=True)
    assert [token for tokens in request.sent for token in tokens] == request.tokens
