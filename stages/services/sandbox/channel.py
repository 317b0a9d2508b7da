"""The two ways out of a sandbox, of which nothing is believed: the control channel and the output.

The channel takes exactly one line where one was asked for; anything else ends the sandbox.  The output is read as it
comes, keeps its beginning and its end, and ends the sandbox where there is no end of it.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from typing import Any, Final, cast

from penstock.stages.services.sandbox.kept import Kept

_LONGEST_ANSWER: Final = 4 << 20
_AT_ONCE: Final = 64
"""How many pieces of output are read before others have their turn."""


class Channel(asyncio.Protocol):
    """Asks one question at a time, in lines of JSON."""

    def __init__(self, kill: Callable[[], None]) -> None:
        self._kill = kill
        self._transport: asyncio.Transport | None = None
        self._line = bytearray()
        self._answer: asyncio.Future[dict[str, Any]] | None = None
        self.ended = asyncio.Event()

    @property
    def open(self) -> bool:
        """Whether questions can be asked."""
        return self._transport is not None and not self.ended.is_set()

    def ask(self, question: dict[str, Any]) -> None:
        """Send a line."""
        assert self._transport is not None
        self._line.clear()
        self._answer = asyncio.get_running_loop().create_future()
        if self.ended.is_set():
            self._answer.cancel()
        else:
            self._transport.write(json.dumps(question).encode() + b"\n")

    async def answer(self, seconds: float) -> dict[str, Any] | None:
        """The answer to the latest question; None if there is none yet, or if there will be none."""
        assert self._answer is not None
        await asyncio.wait({self._answer}, timeout=seconds)
        if not self._answer.done() or self._answer.cancelled():
            return None
        return self._answer.result()

    def shut(self) -> None:
        """No more questions, and no answers."""
        self.ended.set()
        if self._answer is not None:
            self._answer.cancel()
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The channel is there."""
        self._transport = cast("asyncio.Transport", transport)  # as uvloop's are without being of that class

    def connection_lost(self, exc: Exception | None) -> None:
        """The other end is gone, and with it what could be asked."""
        self._kill()

    def data_received(self, data: bytes) -> None:
        """A part of an answer, or a misdeed."""
        self._line += data
        if self._answer is None or self._answer.done() or len(self._line) > _LONGEST_ANSWER:
            self._kill()
        elif b"\n" in self._line:
            self._settle(self._answer)

    def _settle(self, answer: asyncio.Future[dict[str, Any]]) -> None:
        try:
            told = json.loads(self._line)
        except (ValueError, RecursionError):
            told = None
        if isinstance(told, dict):
            answer.set_result(told)
        else:
            self._kill()


class Output:
    """Reads all that is written, and keeps some of what was written since the latest question."""

    def __init__(self, end: int, most: int, flood: int, flooded: Callable[[], None]) -> None:
        self._end: int | None = end
        self._most = most
        self._flood = flood
        self._flooded = flooded
        self._kept = Kept(most)
        self._loop: asyncio.AbstractEventLoop | None = None
        os.set_blocking(end, False)

    def watch(self) -> None:
        """Read whenever there is something."""
        self._loop = asyncio.get_running_loop()
        assert self._end is not None
        self._loop.add_reader(self._end, self.read)

    def forget(self) -> None:
        """Begin anew, with a new question."""
        self._kept = Kept(self._most)

    def text(self) -> str:
        """What is kept."""
        return self._kept.text()

    def read(self) -> None:
        """Take what is there."""
        for _ in range(_AT_ONCE):
            if not self._take():
                return
            if self._kept.total > self._flood:
                self._flooded()
                return

    def close(self) -> None:
        """Read no more."""
        if self._end is not None:
            if self._loop is not None:
                self._loop.remove_reader(self._end)
            os.close(self._end)
            self._end = None

    def _take(self) -> bool:
        if self._end is None:
            return False
        try:
            data = os.read(self._end, 65536)
        except BlockingIOError:
            return False
        if data:
            self._kept.add(data)
        else:
            self.close()
        return bool(data)
