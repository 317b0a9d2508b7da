"""The checks of a server: which ones, how many at once, and what became of each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from http import HTTPStatus

import msgspec

from penstock.extensions.workbench.conformance.check import Check, Doubt, Lacking, Limited, Speech, Verdict, Violation
from penstock.extensions.workbench.conformance.client import ADVICE, UNKNOWN, Server, Talk
from penstock.pipeline.errors import CannotRun
from penstock.pipeline.logs import counted
from penstock.pipeline.urls import shown_url

CHECK_TIME = 4
"""Time that a check may take, in times of that of a request."""
LONGEST_TEXT = 400
"""Characters of what was sent, of what came and of the reason that are shown."""


@dataclass(frozen=True)
class Outcome:
    """The verdict of a check, its reason, and the last exchange with the server."""

    check: Check
    verdict: Verdict
    reason: str = ""
    sent: str = ""
    came: str = ""
    seconds: float = 0.0
    is_unrecorded: bool = False
    """True if the server refused a request because it answers from recordings."""

    @property
    def is_limited(self) -> bool:
        """True if the check could not tell, as the server limits the key."""
        return self.verdict == "skip" and self.reason == ADVICE


def chosen(checks: Iterable[Check], speeches: Collection[Speech], names: Sequence[str]) -> list[Check]:
    """Return the checks of the dialects whose names, areas or parts of names match."""
    found = [check for check in checks if check.speech in speeches]
    if names:
        found = [check for check in found if any(_matches(check, name) for name in names)]
    if not found:
        raise CannotRun(f"no check is named {', '.join(names)}: penstock conformance --list names all")
    return found


def _matches(check: Check, name: str) -> bool:
    return name in (check.area, check.speech) or fnmatchcase(check.name, name) or name == check.name.partition(".")[2]


async def model_of(server: Server, wanted: str) -> str:
    """Return the model to request: the one that is wanted, or the first one that the server lists.

    Raise `CannotRun` if the server cannot be reached, or if it names none.
    """
    talk = server.talk("chat")
    try:
        answer = await talk.send("GET", "/models")
    except Violation as violation:
        raise CannotRun(
            f"no server answers at {shown_url(server.base, with_path=True)}: {shown(str(violation), server.key)}"
        ) from None
    except Limited as limited:
        raise CannotRun(f"{shown_url(server.base, with_path=True)}: {limited}") from None
    if wanted:
        return wanted
    with suppress(Violation, KeyError, IndexError, TypeError):
        if isinstance(model := answer.json["data"][0]["id"], str):
            return model
    cure = "give a key in PENSTOCK_KEY" if answer.status in (401, 403) else "give one with --model"
    raise CannotRun(f"{server.base}/models names no model (status {answer.status}): {cure}")


async def spoken(server: Server, speeches: Collection[Speech]) -> dict[Speech, str]:
    """Return the dialects that a server does not have, at least not for its model, each with the reason."""
    missing: dict[Speech, str] = {}
    for speech in speeches:
        talk = server.talk(speech)
        with suppress(Violation, Limited):
            answer = await talk.probe()
            if answer.status == HTTPStatus.NOT_IMPLEMENTED or (
                answer.status in UNKNOWN and not _names_model(answer.body)
            ):
                missing[speech] = f"the server has no {talk.path} for {server.model}: {answer.status}"
    return missing


def _names_model(body: bytes) -> bool:
    """Return whether a refusal is about the model of the request."""
    return b"model" in body


async def outcomes(
    server: Server, checks: Sequence[Check], *, missing: dict[Speech, str], at_once: int
) -> AsyncGenerator[Outcome, None]:
    """Yield the outcome of each check, in their order."""
    places = asyncio.Semaphore(at_once)

    async def of(check: Check) -> Outcome:
        if reason := missing.get(check.speech):
            return Outcome(check, "skip", reason)
        async with places:
            return await outcome(server, check)

    running = [asyncio.create_task(of(check)) for check in checks]
    try:
        for task in running:
            yield await task
    finally:
        for task in running:
            task.cancel()


async def outcome(server: Server, check: Check) -> Outcome:
    """Run one check."""
    talk, begun = server.talk(check.speech), time.monotonic()
    verdict, reason = await _verdict(check, talk)
    exchange = (talk.sent, talk.came) if verdict in ("fail", "warn") else ("", "")
    reason, sent, came = (shown(text, server.key) for text in (reason, *exchange))
    return Outcome(
        check,
        verdict=verdict,
        reason=reason,
        sent=sent,
        came=came,
        seconds=time.monotonic() - begun,
        is_unrecorded=talk.is_unrecorded,
    )


async def _verdict(check: Check, talk: Talk) -> tuple[Verdict, str]:
    seconds = talk.server.timeout * CHECK_TIME
    try:
        async with asyncio.timeout(seconds):
            await check.run(talk)
    except TimeoutError:
        return "fail", f"it took more than {seconds:g} s"
    except Violation as violation:
        return "fail", str(violation)
    except Limited as limited:
        return "skip", str(limited)
    except Lacking as lacking:
        return ("fail", f"the API needs this: {lacking}") if check.is_core else ("skip", str(lacking))
    except Doubt as doubt:
        return "warn", str(doubt)
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        # A body is what a server makes of it: the code of the checks reads it as if it had the form of the reference.
        return "fail", f"the answer is not of the form of the reference: {type(error).__name__}: {error}"
    return "pass", ""


def shown(text: str, key: str) -> str:
    """Return a text of a server in one line, short, without the key and without what could control a terminal."""
    if key:
        text = text.replace(key, "***")
    escaped = (part if part.isprintable() else part.encode("unicode_escape").decode() for part in text[:LONGEST_TEXT])
    line = "".join(escaped)[:LONGEST_TEXT]
    return line if len(text) <= LONGEST_TEXT else f"{line} … {counted(len(text) - LONGEST_TEXT, 'character')} more"
