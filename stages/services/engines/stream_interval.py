"""Adapt vLLM's stream interval (tokens per output) to the load of the event loop.

Sending one token to a client costs nearly as much as sending eight at once.  So streams get each token as it is
generated while the loop has time, and up to `MOST` tokens at once while it is overloaded.  The first token of a stream
never waits.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from penstock.stages.models.vllm_private import set_stream_interval

MOST = 8
"""Maximum tokens per output, under the highest load."""

PERIOD = 0.1
"""Seconds between two measurements."""

BUSY, FREE = 0.8, 0.4
"""Share of its time that a loop works: above ``BUSY`` it is overloaded, below ``FREE`` it has time.

Halving the interval at most doubles the load, so a loop below ``FREE`` cannot jump above ``BUSY``."""

LATE, ON_TIME = 0.02, 0.005
"""Timer delay in seconds: above ``LATE`` the loop is overloaded, below ``ON_TIME`` it is not.

A loop that works little can still be late if it shares its processor with other processes."""

LOOKS = 3
"""Number of measurements in a row that have to find the loop late.

One alone may have met a pause of the machine, or the moment in which every stream gets its token of the same step."""


class StreamInterval:
    """State machine for the number of tokens per output.  It does no I/O."""

    def __init__(self) -> None:
        self.interval = 1
        self._delays = deque([0.0] * LOOKS, maxlen=LOOKS)

    def feed(self, busy: float, late: float) -> int:
        """Return the next interval: ``busy`` is the share of time worked, ``late`` a timer's delay in seconds."""
        self._delays.append(late)
        least = min(self._delays)
        if busy > BUSY or least > LATE:
            self.interval = min(self.interval * 2, MOST)
        elif busy < FREE and least < ON_TIME:
            self.interval = max(self.interval // 2, 1)
        return self.interval


async def adapt_stream_interval(states: Mapping[str, Any]) -> None:
    """Set the stream interval of running requests by this loop's load, until cancelled.

    ``states`` are the request states of vLLM's output processor.
    """
    controller, was = StreamInterval(), 1
    while True:
        worked, looked = time.thread_time(), time.monotonic()
        await asyncio.sleep(PERIOD)
        passed = time.monotonic() - looked
        interval = controller.feed((time.thread_time() - worked) / passed, passed - PERIOD)
        if max(interval, was) > 1:
            was = max([set_stream_interval(state, interval) for state in states.values()], default=1)
