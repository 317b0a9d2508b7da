"""Pace: how many tokens of a stream come at once, so that a loop with more to do than time does less for each.

A token by itself costs nearly as much on its way to a client as eight together.  So streams get each token as it comes
while the loop has time, and up to `MOST` at once while it has none.  The first token of a stream never waits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger(__name__)

MOST = 8
"""Tokens that come at once where there is the most to do."""

PERIOD = 0.1
"""Seconds between two looks."""

BUSY, FREE = 0.7, 0.3
"""The share of its time in which a loop works, above which it has too much to do, and below which it has time.

Half the interval is at most twice the work: from below the one it does not lead beyond the other."""

LATE, PUNCTUAL = 0.02, 0.005
"""Seconds.  A loop whose timers are so late has too much to do, however little it works: it shares its processor."""


class Pace:
    """The machine: how many tokens come at once."""

    def __init__(self) -> None:
        self.interval = 1

    def feed(self, busy: float, late: float) -> int:
        """Take how the loop did since the last time: its share of work, and by how many seconds a timer was late."""
        if busy > BUSY or late > LATE:
            self.interval = min(self.interval * 2, MOST)
        elif busy < FREE and late < PUNCTUAL:
            self.interval = max(self.interval // 2, 1)
        return self.interval


async def keep_pace(states: Mapping[str, Any]) -> None:
    """Set the pace of the requests whose ``states`` vLLM's output processor has, by how this loop does.

    These states are no public part of vLLM: where they are not as expected, streams keep the pace that they have.
    """
    try:
        await _keep_pace(states)
    except Exception:
        logger.exception("Streams keep their pace, whatever there is to do: vLLM's output processor has changed")


async def _keep_pace(states: Mapping[str, Any]) -> None:
    pace, was = Pace(), 1
    while True:
        worked, looked = time.thread_time(), time.monotonic()
        await asyncio.sleep(PERIOD)
        passed = time.monotonic() - looked
        interval = pace.feed((time.thread_time() - worked) / passed, passed - PERIOD)
        if max(interval, was) > 1:
            was = max([set_pace(state, interval) for state in states.values()], default=1)


def set_pace(state: Any, interval: int) -> int:
    """Let the tokens of a request come so many at once, or two where some of them still wait; returns how many.

    For an interval of one vLLM neither sends what waits, nor counts what it sends.
    """
    generated = state.detokenizer.num_output_tokens()
    if state.stream_interval == 1:
        state.sent_tokens_offset = generated
    elif state.sent_tokens_offset < generated:
        interval = max(interval, 2)
    state.stream_interval = interval
    return interval
