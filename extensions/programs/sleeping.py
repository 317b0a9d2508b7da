"""The programs that wait for the outcomes of their calls, each with its process.

They hold no place of the sandboxes.  They are bounded in all and per owner, and each ends after its time.  A program
whose process has ended runs again from its start, so that nothing is lost but time.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final, TypeAlias

from penstock.extensions.programs.running import RunningProgram
from penstock.pipeline import metrics

PER_SLOT: Final = 2
"""Programs of a server that wait for each place of its sandboxes, as they hold none."""

Key: TypeAlias = tuple[str, str]
"""The owner and the call of a program."""


@dataclass
class _Sleeper:
    program: RunningProgram
    expiry: asyncio.TimerHandle


class Sleeping:
    """At most ``most`` programs, of which an owner may have half; each ends ``seconds`` after it began to wait.

    The one that has waited longest makes room for another one.
    """

    def __init__(self, most: int, seconds: float) -> None:
        self._most = most
        self._seconds = seconds
        self._sleepers: dict[Key, _Sleeper] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._sleepers)

    def put(self, key: Key, program: RunningProgram) -> None:
        """Let a program wait."""
        self.drop(key)
        owner = key[0]
        own = [each for each in self._sleepers if each[0] == owner]
        if owner and len(own) >= -(-self._most // 2):
            self.drop(own[0])
        elif len(self._sleepers) >= self._most:
            self.drop(next(iter(self._sleepers)))
        if self._is_closed or not program.is_alive:
            self.end(program)
        else:
            expiry = asyncio.get_running_loop().call_later(self._seconds, self.drop, key)
            self._sleepers[key] = _Sleeper(program, expiry)
            metrics.PROGRAMS_SLEEPING.inc()

    def take(self, key: Key) -> RunningProgram | None:
        """Return the program that waits for this call, which does not wait here any more; None if none does."""
        if (sleeper := self._sleepers.pop(key, None)) is None:
            return None
        sleeper.expiry.cancel()
        metrics.PROGRAMS_SLEEPING.dec()
        return sleeper.program

    def drop(self, key: Key) -> None:
        """End the program that waits for this call, if one does."""
        if program := self.take(key):
            self.end(program)

    def end(self, program: RunningProgram) -> asyncio.Task[None]:
        """End a program, and return the task that does it, which is not lost if the caller is cancelled."""
        ending = asyncio.create_task(program.end())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        return ending

    async def close(self) -> None:
        """End all programs, and keep no more."""
        self._is_closed = True
        for key in list(self._sleepers):
            self.drop(key)
        await asyncio.gather(*self._ending)
