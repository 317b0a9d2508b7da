"""The check of a dialect."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from penstock.api.dialect import Dialect
from penstock.api.dialects.named import problems, rehearsed_routes
from penstock.api.http.bodies import Problem
from penstock.api.http.conventions import RequestError
from penstock.api.http.wire import EVENT_STREAM, Reading, Wire
from penstock.pipeline.core import Pipeline, source_of
from penstock.pipeline.errors import EngineFailed, InvalidRequest, StageError
from penstock.pipeline.frames import ParsedFrame
from penstock.pipeline.lifecycle.rules import InvariantBroken, rule
from penstock.pipeline.protocol.events import ResponseEvent
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.pipeline.secret import plain_json
from penstock.stages.emit.emit import Emit
from penstock.testing.rules import keep_all
from penstock.testing.stages import replayed, turn


async def check_dialect(
    dialect: Dialect,
    bodies: Iterable[bytes],
    heard: Callable[[bytes], Any],
    recordings: Iterable[Path | str] = (),
    *,
    seconds: float = 30.0,
) -> None:
    """Check that a dialect keeps all rules of `Dialect`, without a server.

    ``bodies`` are right requests.  ``heard`` returns what a client makes of a whole stream: the body of the same answer
    without a stream; it skips each ``keep_alive``.  The answers are a short text, one that fails, and those of
    ``recordings``.  Raises `BrokenRule` at the first rule that the dialect breaks, or if a rule takes more than
    ``seconds``.
    """
    answers = [await _emitted(False), await _emitted(True), *[await _events(recording) for recording in recordings]]
    tester = _Speaker(dialect, tuple(bodies), heard, answers)
    await keep_all(_RULES, tester, seconds)


async def _emitted(fails: bool) -> list[ResponseEvent]:
    """Return the events of a short text, which may break off."""
    frames = await turn("Hel", "lo")

    async def source() -> AsyncGenerator[ParsedFrame, None]:
        for frame in frames[: 3 if fails else None]:
            yield frame
        if fails:
            raise EngineFailed("The engine has failed.")

    async with Pipeline.start("emit", Emit()).open(source()) as emitted:
        return [frame async for frame in emitted if isinstance(frame, ResponseEvent)]


async def _events(recording: Path | str) -> list[ResponseEvent]:
    return [frame for frame in await replayed(recording) if isinstance(frame, ResponseEvent)]


@dataclass(frozen=True)
class _Speaker:
    """A dialect, with what it has to read and to write."""

    dialect: Dialect
    bodies: tuple[bytes, ...]
    heard: Callable[[bytes], Any]
    answers: Sequence[Sequence[ResponseEvent]]

    @property
    def wires(self) -> list[Wire]:
        """The forms of the answers: that of the dialect, and those that the bodies ask for."""
        return [self.dialect.wire, *(self.dialect.read(body).wire for body in self.bodies)]

    async def answered(self) -> AsyncIterator[tuple[Wire, list[bytes], Any]]:
        """Yield each answer in each form: the frames of its stream, and its body; one that is an error is left out."""
        for wire in self.wires:
            for answer in self.answers:
                try:
                    async with wire.translated(source_of(answer)) as events:
                        body = plain_json(await wire.fold(events))
                except StageError:
                    continue
                async with wire.translated(source_of(answer)) as events:
                    yield wire, [*[wire.encode(event) async for event in events], wire.end], body

    def check_frame(self, wire: Wire, frame: object, name: str) -> None:
        rule(isinstance(frame, bytes), f"{name} is bytes, not {frame!r}")
        assert isinstance(frame, bytes)
        is_whole = wire.content_type != EVENT_STREAM or frame.endswith(b"\n\n") or not frame
        rule(is_whole, f"{name} ends with an empty line, as all of text/event-stream: {frame!r}")


_WRONG_BODIES = (b"", b"{", b"[]", b"null", b"5", b'"Hi"', b"\xff\xfe", b'{"a": NaN}', b'{"a":' + b"[" * 100_000)


async def _check_read(speaker: _Speaker) -> None:
    rule(bool(speaker.bodies), "give the bodies of right requests")
    for body in speaker.bodies:
        reading = speaker.dialect.read(body)
        rule(isinstance(reading, Reading), f"read returns a Reading, not {reading!r}")
        rule(isinstance(reading.request, CreateResponse), "the request of a Reading is a CreateResponse")
        rule(isinstance(reading.wire, Wire), "the wire of a Reading is a Wire")
        weaves = not reading.others or reading.wire.weave is not None
        rule(weaves, "a Reading with others has a Wire that can weave their answers into one")


async def _check_wrong_bodies(speaker: _Speaker) -> None:
    for body in _WRONG_BODIES:
        shown = f"read raises InvalidRequest for {body[:20]!r}"
        try:
            speaker.dialect.read(body)
        except InvalidRequest:
            continue
        except Exception as error:
            raise InvariantBroken(f"{shown}, not {type(error).__name__}: {error}") from error
        raise InvariantBroken(shown)


async def _check_encode(speaker: _Speaker) -> None:
    for wire in speaker.wires:
        speaker.check_frame(wire, wire.end, "end")
        speaker.check_frame(wire, wire.keep_alive, "keep_alive")
        for answer in speaker.answers:
            async with wire.translated(source_of(answer)) as events:
                async for event in events:
                    speaker.check_frame(wire, wire.encode(event), "what encode returns")


async def _check_fold(speaker: _Speaker) -> None:
    async for _, frames, body in speaker.answered():
        heard = plain_json(speaker.heard(b"".join(frames)))
        rule(heard == body, f"a stream says what the body of the answer says: {heard!r} is not {body!r}")


async def _check_idle(speaker: _Speaker) -> None:
    async for wire, frames, body in speaker.answered():
        sign = wire.keep_alive
        rule(bool(sign), "keep_alive is not empty: a proxy would close a stream that is silent for long")
        try:
            heard = plain_json(speaker.heard(sign + sign.join(frames)))
        except Exception as error:
            raise InvariantBroken(f"a client skips keep_alive between two frames: {sign!r} raised {error!r}") from error
        rule(heard == body, f"a client skips keep_alive between two frames: with {sign!r}, it hears {heard!r}")


async def _check_conventions(speaker: _Speaker) -> None:
    conventions = speaker.dialect.conventions
    rule(bool(conventions.key_headers), "key_headers names a header")
    for status in (400, 401, 403, 404, 408, 409, 413, 415, 429, 500, 503):
        error = RequestError(status, Problem("What is wrong.", "server_error", None, None), "req_1")
        answered, body = conventions.error(error)
        rule(400 <= answered <= 599, f"the status of an error is one of an error, not {answered}")
        msgspec.convert(plain_json(body), conventions.error_body)
        for wire in speaker.wires:
            if wire.fault:
                speaker.check_frame(wire, wire.fault(error), "what fault returns")


async def _check_routes(speaker: _Speaker) -> None:
    for problem in problems(speaker.dialect, rehearsed_routes(speaker.dialect)):
        raise InvariantBroken(problem)


_RULES: dict[str, Callable[[_Speaker], Awaitable[None]]] = {
    "read": _check_read,
    "wrong bodies": _check_wrong_bodies,
    "encode": _check_encode,
    "fold": _check_fold,
    "idle": _check_idle,
    "errors": _check_conventions,
    "routes": _check_routes,
}
"""The rules of a dialect, each with its check."""
