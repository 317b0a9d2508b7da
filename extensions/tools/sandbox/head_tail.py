"""The kept part of an output that may be endless: its beginning and its end.

The sandbox for commands also gets this file as text.
"""

from __future__ import annotations


class HeadTailBuffer:
    """The first and the last bytes of an output, ``most`` in total."""

    def __init__(self, most: int) -> None:
        self._half = max(most // 2, 1)
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = self._half - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > 2 * self._half:
            del self._tail[: -self._half]

    def text(self) -> str:
        """Return the kept output, with a line in place of the bytes left out."""
        tail = self._tail[-self._half :]
        left_out = self.total - len(self._head) - len(tail)
        if not left_out:
            return (self._head + tail).decode("utf-8", "replace")
        head, end = self._head.decode("utf-8", "ignore"), tail.decode("utf-8", "ignore")
        return f"{head}\n[... {left_out} bytes are left out here ...]\n{end}"
