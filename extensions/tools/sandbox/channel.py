"""The two ways data leaves a sandbox: the control channel and the output.  Neither is trusted.

The channel accepts exactly one line per question; anything else ends the sandbox.  The output is read as it arrives.
Only its beginning and its end are kept, and a sandbox that writes too much is ended.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from typing import Any, Final, cast

from penstock.extensions.tools.sandbox.head_tail import HeadTailBuffer
from penstock.services.json_size import JsonSize, exceeds

_LONGEST_ANSWER: Final = 4 << 20
"""Bytes of an answer."""
_LARGEST: Final = JsonSize(containers=1_000, commas=10_000)
"""The size of an answer: a text for each stream of a command, and its outcome."""
_AT_ONCE: Final = 64
"""Maximum number of reads before other tasks get their turn."""


class Channel(asyncio.Protocol):
    """The control channel: one question at a time, as lines of JSON."""

    def __init__(self, kill: Callable[[], None]) -> None:
        self._kill = kill
        self._transport: asyncio.Transport | None = None
        self._line = bytearray()
        self._number = 0
        self._answer: asyncio.Future[dict[str, Any]] | None = None
        self.ended = asyncio.Event()

    @property
    def open(self) -> bool:
        """True if the sandbox can answer questions."""
        return self._transport is not None and not self.ended.is_set()

    def ask(self, question: dict[str, Any]) -> None:
        """Send a question, with a number that its answer must have, as one line of JSON.

        A value of the question that is bytes is JSON already.
        """
        assert self._transport is not None
        self._line.clear()
        self._number += 1
        self._answer = asyncio.get_running_loop().create_future()
        if self.ended.is_set():
            self._answer.cancel()
        else:
            fields = {**question, "number": self._number}.items()
            line = b", ".join(b"%b: %b" % (_json(name), _json(value)) for name, value in fields)
            self._transport.write(b"{%b}\n" % line)

    async def answer(self, seconds: float) -> dict[str, Any] | None:
        """Return the answer to the latest question; None after ``seconds`` or if the channel is closed."""
        assert self._answer is not None
        await asyncio.wait({self._answer}, timeout=seconds)
        if not self._answer.done() or self._answer.cancelled():
            return None
        return self._answer.result()

    def shut(self) -> None:
        """Close the channel, and cancel a pending answer."""
        self.ended.set()
        if self._answer is not None:
            self._answer.cancel()
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transports do not subclass it

    def connection_lost(self, exc: Exception | None) -> None:
        """End the sandbox: without the channel it is of no use."""
        self._kill()

    def data_received(self, data: bytes) -> None:
        """Collect the answer; end the sandbox if it sends too much, or sends data without a question."""
        self._line += data
        if self._answer is None or self._answer.done() or len(self._line) > _LONGEST_ANSWER:
            self._kill()
        elif b"\n" in self._line:
            self._resolve(self._answer)

    def _resolve(self, answer: asyncio.Future[dict[str, Any]]) -> None:
        try:
            message = None if exceeds(bytes(self._line), _LARGEST) else json.loads(self._line)
        except (ValueError, RecursionError):
            message = None
        if isinstance(message, dict) and message.get("number") == self._number:
            answer.set_result(message)
        else:
            self._kill()


def _json(value: Any) -> bytes:
    return value if isinstance(value, bytes) else json.dumps(value).encode()


class Output:
    """Reads all output of a sandbox, and keeps part of the output since the latest question.

    ``end`` is the descriptor to read, ``most`` the number of bytes to keep.  `flooded` is called after ``flood`` bytes.
    """

    def __init__(self, end: int, most: int, flood: int, flooded: Callable[[], None]) -> None:
        self._end: int | None = end
        self._most = most
        self._flood = flood
        self._flooded = flooded
        self._kept = HeadTailBuffer(most)
        self._loop: asyncio.AbstractEventLoop | None = None
        os.set_blocking(end, False)

    def watch(self) -> None:
        self._loop = asyncio.get_running_loop()
        assert self._end is not None
        self._loop.add_reader(self._end, self.read)

    def forget(self) -> None:
        """Discard the kept output, before a new question."""
        self._kept = HeadTailBuffer(self._most)

    def text(self) -> str:
        return self._kept.text()

    def read(self) -> None:
        """Read the available output, and call `flooded` if there is too much."""
        for _ in range(_AT_ONCE):
            if not self._take():
                return
            if self._kept.total > self._flood:
                self._flooded()
                return

    def close(self) -> None:
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
