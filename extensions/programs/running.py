"""A program in its sandbox, which asks for calls in rounds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

from penstock.extensions.programs.arguments import Checks, WrongArguments, parsed
from penstock.extensions.programs.names import Function, Names
from penstock.extensions.tools.sandbox.folder import Folder
from penstock.extensions.tools.sandbox.process import Process, SandboxDied
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.pipeline.protocol.tools import tool_key
from penstock.pipeline.tasks import in_thread
from penstock.services.tools import LONGEST_RESULT, NestedCall, PastCall, Refusal, bounded

MOST_AT_ONCE: Final = 64
"""Calls of a round: others wait for the next one."""

MOST_CALLS: Final = 1_000
"""Calls of a program."""

LONGEST_ROUND: Final = 8_000_000
"""Characters of the results of a round; those beyond are errors."""

LONGEST_CALLS: Final = 32_000_000
"""Characters of the arguments and the results of all calls of a program: the server keeps them."""

LONGEST_ERROR: Final = 10_000
"""Characters of an error that a program gets; the middle of a longer one is left out."""


class ProgramFailed(Exception):
    """The program cannot go on; the message says why, and ``limit`` names the limit that it exceeded, if it did."""

    def __init__(self, message: str, limit: str = "") -> None:
        super().__init__(message)
        self.limit = limit


@dataclass(frozen=True)
class Opening:
    """The code of a program, and the functions that it may call."""

    code: str
    names: Names

    @property
    def question(self) -> dict[str, Any]:
        """The question that begins it in the sandbox."""
        functions = [(each.path, dict(each.parameters), each.text_argument) for each in self.names.functions]
        return {"code": self.code, "functions": functions, "at_once": MOST_AT_ONCE}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opening) and (self.code, self.names.functions) == (other.code, other.names.functions)

    def __hash__(self) -> int:
        return hash(self.code)


@dataclass(frozen=True)
class Asked:
    """A call that a program asks for."""

    call: NestedCall
    error: str | None
    """The fault of its arguments, or its refusal, if it has one: such a call does not leave."""


class RunningProgram:
    """A program in a sandbox of its own."""

    def __init__(self, process: Process, folder: Folder, opening: Opening) -> None:
        self._process = process
        self._folder = folder
        self._opening = opening
        self._round: Sequence[Asked] | None = ()
        """The calls that it waits for: none before it begins, and None when it has ended."""
        self._has_begun = False
        self._done: list[PastCall] = []
        """The calls whose outcomes it has, but for those that did not leave."""
        self._heard: Sequence[PastCall] = ()
        """The calls that it waits for, and whose outcomes are known."""
        self._refusal: Refusal = lambda _: None
        self._number = 0
        self._characters = 0
        self._used = 0.0

    @property
    def is_alive(self) -> bool:
        """True if its process can go on."""
        return self._process.alive

    @property
    def excess(self) -> str | None:
        """The limit of the sandbox that it exceeded; None if it did not."""
        return self._process.excess

    @property
    def written(self) -> str:
        """All that it has written."""
        return self._process.written

    def fits(self, opening: Opening, past: Sequence[PastCall]) -> bool:
        """Return True if this is the program, and its calls so far are among the past ones."""
        own = self._done
        return (
            self.is_alive and self._opening == opening and len(past) >= len(own) and all(map(_is_same_past, own, past))
        )

    def hear(self, past: Sequence[PastCall]) -> None:
        """Keep the outcomes of ``past`` calls that it has not got yet, as it waits for others."""
        self._heard = past[len(self._done) :]

    def _recalled(self, past: Sequence[PastCall]) -> list[PastCall]:
        """Return past calls with the outcomes that were heard of, where they are no longer known."""
        heard, got = [(was, _value(was.call.arguments)) for was in self._heard], len(self._done)
        found = list(past[:got])
        for each in past[got:]:
            at = None if each.is_known or not heard else _first_same(each.call, heard)
            found.append(each if at is None else heard.pop(at)[0])
        return found

    async def advance(
        self, past: Sequence[PastCall], seconds: float, refusal: Refusal
    ) -> tuple[NestedCall, ...] | None:
        """Let it go on with the outcomes of ``past`` calls; return the calls that it waits for, or None at its end.

        It may run for ``seconds`` in all of its steps.  Raises `ProgramFailed` or `SandboxDied`.
        """
        if len(past) > MOST_CALLS:
            raise ProgramFailed(f"A program makes no more than {MOST_CALLS:,} calls.", "calls")
        past = await in_thread(self._recalled, past)  # their arguments may be long
        self._refusal = refusal
        with self._running():
            if not self._has_begun:
                await self._go_on(self._opening.question, past, seconds)
            while self._round is not None:
                leaving = [asked.call for asked in self._round if asked.error is None]
                known = past[len(self._done) : len(self._done) + len(leaving)]
                await in_thread(self._check, leaving, known)  # their arguments may be long
                if len(known) < len(leaving):
                    return tuple(leaving[len(known) :])
                self._done += known
                self._count(each.result or "" for each in known)
                outcomes = await in_thread(_encoded, self._round, known)
                await self._go_on({"outcomes": outcomes}, past, seconds)
        if len(self._done) < len(past):
            raise ProgramFailed(_difference(len(self._done) + 1, past[len(self._done)].call, None))
        return None

    def _check(self, leaving: Sequence[NestedCall], known: Sequence[PastCall]) -> None:
        """Raise `ProgramFailed` if calls are others than past ones, or if the result of one is not known."""
        for at, (call, was) in enumerate(zip(leaving, known, strict=False), len(self._done) + 1):
            if not _is_same(call, was.call):
                raise ProgramFailed(_difference(at, was.call, call))
            if not was.is_known:
                raise ProgramFailed(f"The program cannot go on: the result of its call {at} is no longer known.")

    def kill(self) -> None:
        """End it without waiting for that."""
        self._process.kill()

    async def end(self) -> None:
        """End its process, and remove its folder."""
        await self._process.end()
        await self._folder.remove()

    @contextmanager
    def _running(self) -> Iterator[None]:
        self._process.resume()
        try:
            yield
        finally:
            if self.is_alive:
                self._process.pause()

    async def _go_on(self, question: dict[str, Any], past: Sequence[PastCall], seconds: float) -> None:
        """Let it run until its tasks wait for a round of calls, or it ends."""
        if (left := seconds - self._used) <= 0:
            raise _late(seconds)
        now = asyncio.get_running_loop().time
        began = now()
        is_past = len(self._done) < len(past)
        try:
            answer = await self._process.ask({**question, "is_past": is_past}, left, goes_on=self._has_begun)
            asked = await in_thread(self._read, answer)  # schemas of a client may make it long
        except TimeoutError:
            raise _late(seconds) from None
        finally:
            self._has_begun = True
            self._used += now() - began
        self._round = asked and [
            each if each.error else replace(each, error=self._refusal(each.call)) for each in asked
        ]
        self._number += len(self._round or ())
        if self._number > MOST_CALLS:
            raise ProgramFailed(f"The program made more than {MOST_CALLS:,} calls, and was ended.", "calls")
        self._count(each.call.arguments for each in self._round or ())

    def _count(self, texts: Iterable[str]) -> None:
        self._characters += sum(map(len, texts))
        if self._characters > LONGEST_CALLS:
            problem = f"The arguments and results of its calls have more than {LONGEST_CALLS:,} characters"
            raise ProgramFailed(f"The program was ended. {problem}.", "calls")

    def _read(self, answer: dict[str, Any]) -> Sequence[Asked] | None:
        """Return the calls of an answer of the sandbox, which is not trusted; None if it says that it has ended."""
        if (calls := answer.get("calls")) is None:
            return None
        if not isinstance(calls, list) or not 0 < len(calls) <= MOST_AT_ONCE:
            raise SandboxDied("it broke the channel to the server")
        checks = Checks()
        return [self._asked(call, checks) for call in calls]

    def _asked(self, call: Any, checks: Checks) -> Asked:
        match call:
            case [str(path), str(arguments)] if function := self._opening.names.by_path.get(path):
                return Asked(NestedCall(tool_key(function.tool), arguments), _problem(function, arguments, checks))
            case _:
                raise SandboxDied("it called a function that it does not have")


def _late(seconds: float) -> ProgramFailed:
    return ProgramFailed(f"The program ran longer than {seconds:g} seconds, and was ended.", "timeout")


def _problem(function: Function, arguments: str, checks: Checks) -> str | None:
    """Return what is wrong with the arguments of a call; None if nothing is."""
    try:
        if function.text_argument is None:
            checks.check(arguments, getattr(function.tool, "parameters", None) or {})
        else:
            arguments.encode()
    except WrongArguments as error:
        return f"{function.path}: {error}"
    except UnicodeEncodeError:
        return f"{function.path}: the text has characters that are none"
    return None


def _outcome(past: PastCall) -> tuple[str | None, str | None]:
    """Return the result and the error of a call as the program gets them."""
    if past.error is not None:
        return None, bounded(past.error, LONGEST_ERROR)
    if len(past.result or "") > LONGEST_RESULT:
        return None, f"The result is longer than {LONGEST_RESULT:,} characters."
    return past.result, None


def _encoded(asked: Sequence[Asked], known: Sequence[PastCall]) -> bytes:
    """Return the outcomes of a round in JSON, encoded one by one: the encoder lets no other thread run meanwhile."""
    outcomes, left, encoded = iter(map(_outcome, known)), LONGEST_ROUND, list[bytes]()
    for each in asked:
        result, error = next(outcomes) if each.error is None else (None, each.error)
        left -= len(result or "")
        if left < 0:
            result, error = None, f"The results of the calls made at once are longer than {LONGEST_ROUND:,} characters."
        encoded.append(json.dumps((result, error)).encode())
    return b"[" + b", ".join(encoded) + b"]"


def _is_same_past(known: PastCall, given: PastCall) -> bool:
    return _is_same(known.call, given.call) and (not given.is_known or _outcome(known) == _outcome(given))


def _is_same(now: NestedCall, was: NestedCall) -> bool:
    """Return True if a call is the same as one before, whose item may not have had the arguments.

    A client may have written their JSON anew.
    """
    if now.tool != was.tool:
        return False
    return was.arguments in ("", now.arguments) or _are_same(_value(now.arguments), _value(was.arguments))


def _first_same(call: NestedCall, heard: Iterable[tuple[PastCall, Any]]) -> int | None:
    """Return the place of the first of the calls, with the values of their arguments, that is the same as this one."""
    value = _value(call.arguments)
    for at, (was, its) in enumerate(heard):
        if was.call.tool == call.tool and (not call.arguments or _are_same(its, value)):
            return at
    return None


def _value(arguments: str) -> Any:
    """Return the value of arguments that are JSON, and others as they are."""
    try:
        return parsed(arguments)
    except WrongArguments:
        return arguments


def _are_same(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except RecursionError:
        return False


def _difference(at: int, was: NestedCall, now: NestedCall | None) -> str:
    then = f"it was {_shown(now)}" if now else "it made no such call"
    return (
        f"The program cannot go on: its call {at} was {_shown(was)}, and when it ran again, {then}. "
        "A program must depend on its code and on the results of its calls alone."
    )


def _shown(call: NestedCall) -> str:
    return f"{'.'.join(filter(None, call.tool))}({shortened(call.arguments)})"
